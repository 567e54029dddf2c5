"""The tokens that receive most attention from all tokens of the prompt (Prefill-H2O).

After H2O, arXiv 2306.14048, whose heavy hitters are found by cumulated attention. The
attention is that of a full prefill, run on a copy of the cache, so choosing costs more
than what reuse saves: a yardstick of quality, not of speed.
"""

import numpy as np

from ragkv.attend.observe import LayerCall, attention_received
from ragkv.select.method import FloatArray, Method, Scene


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]`` attention received, mean over heads, summed over rows and layers."""
    total = np.zeros(len(scene.layout), dtype=np.float32)

    def observe(call: LayerCall) -> None:
        total[:] += attention_received(call).cpu().numpy()

    scene.observe(observe, rows="all", on_copy=True)
    return total[scene.layout.cached]


METHOD = Method("h2o", source="Prefill-H2O; after H2O, arXiv 2306.14048", score=score)
