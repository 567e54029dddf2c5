"""Explain: why chunks of a prompt, or retrieved for it, were not reused. Reads only values."""

from ragkv.explain.misses import Facts, Lookup, explain, unsupported

__all__ = ["Facts", "Lookup", "explain", "unsupported"]
