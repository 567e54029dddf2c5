"""JSON schemas as llguidance takes them: references, closed objects, formats, what is left out."""
