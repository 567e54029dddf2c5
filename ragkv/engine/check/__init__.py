"""Checks of a loaded model: the invariants of reuse, and how well it copies from reused chunks."""
