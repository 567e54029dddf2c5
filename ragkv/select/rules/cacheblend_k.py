"""CacheBlend over keys: as ``cacheblend``, with layer 1's rotated keys instead of values.

This is the variant of LMCache's blending code.
"""

from ragkv.select.deviation import deviations
from ragkv.select.method import FloatArray, Method, Scene


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]``: the squared differences of layer 1's keys, after rotation."""
    scores: FloatArray = deviations(scene)[0]
    return scores


METHOD = Method(
    "cacheblend_k",
    source="LMCache; after CacheBlend, arXiv 2405.16444",
    score=score,
)
