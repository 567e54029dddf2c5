"""Chunks behind the shared sink, re-positioned, nothing recomputed."""

from ragkv.select.method import Method

METHOD = Method("reuse", source="CacheClip, arXiv 2510.10129, section 3 (no recomputation)")
