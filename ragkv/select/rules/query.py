"""The tokens that the query attends to, over the spliced, unrepaired cache.

After ProphetKV (arXiv 2602.02579) and InfoFlow (arXiv 2603.05353): the primary model itself
shows which context matters for its answer. Only the uncached tokens run, up to the last
observed layer. A token is scored by the attention of the prompt's last token and by the
maximum over the query's tokens: a word's context need not matter to the other words. A small
part of a score spreads to the tokens around, since answers stand near the terms of the
question. Tokens that are not recomputed move with their recomputed neighbours
(:mod:`ragkv.recompute.drift`). In the upper layers recomputed tokens attend sparsely
(:mod:`ragkv.attend.sparse`). Tokens that the answer may copy are recomputed during decoding
(:mod:`ragkv.recompute.copy_repair`).
"""

import torch

from ragkv.attend.sparse import Sparse
from ragkv.select.method import CopyLookup, FloatArray, Method, Scene, Spread

QUERY_ROWS = 64
"""At most so many of the query's last tokens are observed."""


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]`` shares of the query's attention in the layers L/3 to 5L/6.

    Of these, layers with a sliding window count only where all have one.
    """
    layout = scene.layout
    first, last = scene.layers // 3, max(scene.layers * 5 // 6, scene.layers // 3 + 1)
    observed = scene.seeing_all(range(first, last))
    count = min(len(layout) - layout.query_start, QUERY_ROWS)
    paid = scene.attention_of_query(observed, count)
    shares = paid.cpu()[:, torch.from_numpy(layout.cached)]
    shares /= shares.sum(dim=1, keepdim=True).clamp_min(1e-30)
    scores: FloatArray = shares.mean(dim=0).numpy()
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
