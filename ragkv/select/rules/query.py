"""What the query attends to, over the spliced, unrepaired cache; the rest drifts along.

In the line of ProphetKV (arXiv 2602.02579) and InfoFlow (arXiv 2603.05353): the
primary model itself, about to answer, says which context matters to it. Only the
tokens that are not cached run, up to the last layer that is looked at. A token counts
by what the last token pays to it and by the most that any token of the query pays: what
one word of the question asks for need not matter to the others. A little of a score goes
to the tokens around: the answer stands near what was asked for. What is not recomputed
is moved by what the recomputed tokens near it moved by (:mod:`ragkv.recompute.drift`). In
the upper layers recomputed tokens see little else (:mod:`ragkv.attend.sparse`). While
the answer is drawn, what it may copy is computed again, too (:mod:`ragkv.recompute.copy_repair`).
"""

import torch

from ragkv.attend.observe import LayerCall, StopPass, attention_of_query
from ragkv.attend.sparse import Sparse
from ragkv.select.method import CopyLookup, FloatArray, Method, Scene, Spread

QUERY_ROWS = 64
"""At most so many of the query's last tokens are asked."""


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]`` shares of the attention paid in the layers L/3 to 5L/6."""
    layout = scene.layout
    first, last = scene.layers // 3, max(scene.layers * 5 // 6, scene.layers // 3 + 1)
    count = min(len(layout) - layout.query_start, QUERY_ROWS)
    paid = torch.zeros(2, len(layout), dtype=torch.float32, device=scene.cache.device)

    def observe(call: LayerCall) -> None:
        if call.layer >= first:
            paid.add_(attention_of_query(call, count))
        if call.layer >= last - 1:
            raise StopPass

    scene.observe(observe)
    shares = paid.cpu()[:, torch.from_numpy(layout.cached)]
    shares /= shares.sum(dim=1, keepdim=True).clamp_min(1e-30)
    scores: FloatArray = shares.mean(dim=0).numpy()
    return scores


METHOD = Method(
    "query",
    source="ragkv; after ProphetKV and InfoFlow",
    score=score,
    mass=True,
    spread=Spread(0.05, within=8.0),
    drift=True,
    sparse=Sparse(after=0.6, near=16),
    lookup=CopyLookup(tokens=6, at_most=16, rare=4),
)
