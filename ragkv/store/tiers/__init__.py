"""Copies of entries in faster memory, and their eviction."""
