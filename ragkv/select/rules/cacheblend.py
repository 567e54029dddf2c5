"""The tokens whose values at layer 1 differ most between the cache and the real prompt.

CacheBlend, arXiv 2405.16444, section 4: layer 0 is computed in full, then layer 1's
values are. The authors recompute 16% of the tokens; here the share is ``recompute_ratio``.
In the authors' code the check layer attends to fresh keys and values; so it does here,
because the fresh rows of layers 0 and 1, of all tokens, stay in the cache.
"""

import numpy as np
import torch

from ragkv.attend.observe import LayerCall, StopPass
from ragkv.select.method import FloatArray, Method, Scene

CHECK_LAYER = 1
"""The first layer whose keys and values depend on more than the token itself."""


def deviations(scene: Scene) -> FloatArray:
    """Compute all tokens up to the check layer and compare its rows with the cached ones.

    The fresh keys and values of these layers stay in the cache, for all tokens: the sink's and
    those that are not recomputed later, too. A model with one layer is compared there.

    Returns
    -------
    numpy.ndarray
        ``[2, cached]`` float32: the squared differences of keys, after rotation, and of values,
        summed over KV heads and head_dim.
    """
    layer = min(CHECK_LAYER, scene.layers - 1)
    rows = scene.cache.layer(layer)
    cached = torch.from_numpy(scene.layout.cached).to(rows[0].device)
    before = [part[:, cached].float() for part in rows]
    distances = np.zeros((2, len(cached)), dtype=np.float32)

    def observe(call: LayerCall) -> None:
        if call.layer == layer:
            fresh = [part[0, :, cached].float() for part in (call.key, call.value)]
            found = [
                (new - old).square().sum((0, 2)) for new, old in zip(fresh, before, strict=True)
            ]
            distances[:] = torch.stack(found).cpu().numpy()
            raise StopPass

    scene.observe(observe, rows="all")
    return distances


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]``: the squared differences of layer 1's values."""
    scores: FloatArray = deviations(scene)[1]
    return scores


METHOD = Method("cacheblend", score=score)
