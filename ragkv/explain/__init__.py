"""Reasons why chunks of a prompt, or retrieved for it, were not reused."""

from ragkv.explain.misses import Facts, Lookup, explain, unsupported

__all__ = ["Facts", "Lookup", "explain", "unsupported"]
