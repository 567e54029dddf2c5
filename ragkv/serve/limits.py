"""What one request may ask for, and how many precomputations there may be."""

BODY_BYTES = 8 << 20
ANSWERS = 16
"""Of one request: ``n`` times its prompts."""
ANSWER_TOKENS = 1024
"""Longest answer of a chat request that does not say."""
TEXTS = 4096
TEXT_CHARACTERS = 100_000
JOBS = 16
"""Precomputations that wait or run at once."""
