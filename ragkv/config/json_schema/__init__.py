"""JSON schemas rewritten for llguidance."""
