"""The deviation of a layer's cached rows from the rows of the real prompt."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from ragkv.attend.observe import LayerCall, StopPass
from ragkv.select.method import FloatArray, Scene

CHECK_LAYER = 1
"""The first layer whose keys and values depend on more than the token itself."""


def deviation(scene: Scene, states: Literal["keys", "values"]) -> FloatArray:
    """Compute all tokens up to the check layer and compare its rows with the cached ones.

    The fresh keys and values of these layers stay in the cache, for all tokens: the sink's and
    those that are not recomputed later, too. A model with one layer is compared there.

    Parameters
    ----------
    states
        What is compared: ``"values"``, or ``"keys"`` after rotation.

    Returns
    -------
    numpy.ndarray
        ``[cached]`` float32: the squared difference, summed over KV heads and head_dim.
    """
    layer = min(CHECK_LAYER, scene.layers - 1)
    rows = scene.cache.layer(layer)[0 if states == "keys" else 1]
    cached = torch.from_numpy(scene.layout.cached).to(rows.device)
    before = rows[:, cached].float()
    distance = np.zeros(len(cached), dtype=np.float32)

    def observe(call: LayerCall) -> None:
        if call.layer == layer:
            fresh = (call.key if states == "keys" else call.value)[0, :, cached].float()
            distance[:] = (fresh - before).square().sum(dim=(0, 2)).cpu().numpy()
            raise StopPass

    scene.observe(observe, rows="all")
    return distance
