"""What the prompt's last token attends to, over the spliced, unrepaired cache.

In the line of ProphetKV (arXiv 2602.02579) and InfoFlow (arXiv 2603.05353): the
primary model itself, about to answer, says which context matters to it. Only the
tokens that are not cached run, up to the last layer that is looked at. Scores are
averaged over three neighbours: a token that matters brings the rest of its word along.
"""

import torch

from ragkv.select.method import FloatArray, Method, Scene
from ragkv.select.observe import LayerCall, StopPass, attention_of_last_rows

LAST_ROWS = 1
"""Rows that are asked: those about to speak."""


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]`` attention received, summed over the layers L/3 to 5L/6."""
    first, last = scene.layers // 3, max(scene.layers * 5 // 6, scene.layers // 3 + 1)
    total = torch.zeros(len(scene.layout), device=scene.cache.keys.device)

    def observe(call: LayerCall) -> None:
        if call.layer >= first:
            total.add_(attention_of_last_rows(call, LAST_ROWS))
        if call.layer >= last - 1:
            raise StopPass

    scene.probe(observe)
    scores: FloatArray = total.cpu().numpy()[scene.layout.cached]
    return scores


METHOD = Method(
    "query", source="ragkv; after ProphetKV and InfoFlow", score=score, smoothing=3, mass=True
)
