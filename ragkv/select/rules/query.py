"""The tokens that the query attends to, over the spliced, unrepaired cache.

After ProphetKV (arXiv 2602.02579) and InfoFlow (arXiv 2603.05353): the primary model shows which
context matters for its answer. Only the uncached tokens run, up to the last observed layer. A
token's score combines the attention of the prompt's last token and the maximum over the query's
tokens, since a word's context can matter to a single word. A small part of a score spreads to
neighbours, since answers are near the terms of the question. Tokens that are not recomputed move
with their recomputed neighbours (:mod:`ragkv.recompute.drift`). In the upper layers recomputed
tokens attend sparsely (:mod:`ragkv.attend.sparse_rows`). Tokens that an answer will copy are
recomputed during decoding (:mod:`ragkv.recompute.copy_repair`).
"""

import numpy as np

from ragkv.attend.sparse_rows import Sparse
from ragkv.select.method import CopyLookup, FloatArray, Method, Scene, Spread

QUERY_ROWS = 64
"""Most of the query's last tokens that are observed."""


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]`` shares of the query's attention in the layers L/3 to 5L/6.

    Layers with a sliding window count only if all of these have one.
    """
    layout = scene.layout
    first, last = scene.layers // 3, max(scene.layers * 5 // 6, scene.layers // 3 + 1)
    observed = scene.seeing_all(range(first, last))
    count = min(len(layout) - layout.query_start, QUERY_ROWS)
    paid = scene.attention_of_query(observed, count)
    shares = paid.cpu().numpy()[:, layout.cached]
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), np.float32(1e-30))
    scores: FloatArray = shares.mean(axis=0)
    return scores


METHOD = Method(
    "query",
    score=score,
    auto="attention",
    spread=Spread(0.05, within=8.0),
    drift=True,
    sparse=Sparse(after=0.6, near=16),
    lookup=CopyLookup(tokens=6, rare=4, rows=32, every=128),
)
