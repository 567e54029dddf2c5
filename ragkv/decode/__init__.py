"""Generate: transformers' own generation, starting from the repaired cache."""
