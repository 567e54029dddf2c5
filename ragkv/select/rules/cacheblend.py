"""The tokens whose values at layer 1 differ most between the cache and the real prompt.

CacheBlend, arXiv 2405.16444, section 4: layer 0 is computed in full, then layer 1's
values are. The authors recompute 16% of the tokens; here the share is ``recompute_ratio``.
In the authors' code the check layer attends to fresh keys and values; so it does here,
because the fresh rows of layers 0 and 1, of all tokens, stay in the cache.
"""

from ragkv.select.deviation import deviations
from ragkv.select.method import FloatArray, Method, Scene


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]``: the squared differences of layer 1's values."""
    scores: FloatArray = deviations(scene)[1]
    return scores


METHOD = Method(
    "cacheblend",
    source="CacheBlend, arXiv 2405.16444",
    score=score,
)
