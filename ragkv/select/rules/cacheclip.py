"""An auxiliary model's last-layer attention from query to chunk, in windows of 8.

CacheClip, arXiv 2510.10129, second version: a window with more than 5 chosen tokens is recomputed
whole, and windows slide by one token within a chunk, so that a number of seven digits is recomputed
whole at any place. The recompute ratio counts after grouping: the recomputed share is never above
it, and as near below as whole windows allow.
"""

import numpy as np

from ragkv.select.auxiliary import map_scores
from ragkv.select.method import FloatArray, Grouping, Method, Scene


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]`` auxiliary attention, mapped over character offsets."""
    layout = scene.layout
    query = scene.text[int(layout.offsets[layout.query_start, 0]) :]
    texts = [piece.entry.text for piece in layout.placed]
    parts = []
    for piece, (scores, offsets) in zip(
        layout.placed, scene.auxiliary().score(texts, query), strict=True
    ):
        parts.append(map_scores(scores, offsets, piece.entry.offsets)[piece.rows])
    return np.concatenate(parts)


METHOD = Method(
    "cacheclip",
    score=score,
    grouping=Grouping(window=8, threshold=5),
    auxiliary=True,
)
