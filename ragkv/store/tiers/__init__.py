"""Copies of entries in faster memory, and what is evicted from them."""
