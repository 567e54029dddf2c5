"""Recompute: drift of the rows that are not recomputed, and copy repair."""
