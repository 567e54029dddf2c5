"""CacheBlend over keys: as ``cacheblend``, with layer 1's rotated keys instead of values.

This is the variant of LMCache's blending code.
"""

from functools import partial

from ragkv.select.deviation import deviation
from ragkv.select.method import Method

METHOD = Method(
    "cacheblend_k",
    source="LMCache; after CacheBlend, arXiv 2405.16444",
    score=partial(deviation, states="keys"),
)
