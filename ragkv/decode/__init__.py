"""Generate: a decoding loop with transformers' logits processors, from the repaired cache."""
