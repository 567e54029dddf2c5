"""Chunks behind the shared sink, re-positioned, nothing recomputed.

CacheClip, arXiv 2510.10129, section 3.
"""

from ragkv.select.method import Method

METHOD = Method("reuse")
