"""The tokens that the query attends to in all layers, without what ``query`` adds.

ProphetKV, arXiv 2602.02579. Stage I: the query's tokens run over the unrepaired cache, and in layer
l a context token t gets ``alpha_l(t)``, the softmax weights of the query's tokens over the
context's keys alone, summed over heads and query tokens. Stage II: the layers are fused,
``alpha(t) = mean over l of alpha_l(t)``, and the highest tokens are recomputed together with the
query.

From the abstract are the query's attention, its fusion over layers and the two stages. That the
softmax leaves out the query's own keys, and that all layers count alike, follows what
reimplementations say of the paper's algorithm 1 and equation 8. Assumed here: layers with a sliding
window count only where all have one, and there a row attends to the context in its window; a
learned sink keeps its weight.
"""

import torch

from ragkv.attend.observe import LayerCall, StopPass
from ragkv.select import Method, Scene
from ragkv.select.method import FloatArray

ROW_BLOCK = 256
"""Rows whose weights are in memory at once, ``[heads, rows, context]`` float32."""


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]`` the query's attention, mean over layers, heads and query tokens."""
    layout = scene.layout
    context, observed = layout.query_start, scene.seeing_all(range(scene.layers))
    fused = torch.zeros(context, dtype=torch.float32, device=scene.cache.device)

    def observe(call: LayerCall) -> None:
        if call.layer in observed:
            fused.add_(attention_to_context(call, len(layout) - context, context))
        if call.layer == observed[-1]:
            raise StopPass

    scene.observe(observe)
    scores: FloatArray = (fused / len(observed)).cpu().numpy()[layout.cached]
    return scores


def attention_to_context(call: LayerCall, count: int, context: int) -> torch.Tensor:
    """Return what the last ``count`` rows pay to the first keys, which share it among themselves.

    The softmax is over these keys alone, as if the others were not there. Rows whose window ends
    behind them pay nothing.

    Parameters
    ----------
    context
        Number of the keys; all rows stand behind them.

    Returns
    -------
    torch.Tensor
        ``[context]`` float32, mean over heads and rows.
    """
    key, rule = call.key[0, :, :context].float(), call.rule
    places = torch.arange(context, device=key.device)
    paid = torch.zeros(context, dtype=torch.float32, device=key.device)
    for first in range(len(call.rows) - count, len(call.rows), ROW_BLOCK):
        block = slice(first, first + ROW_BLOCK)
        query = call.query[0, :, block].float() * rule.scaling
        grouped = query.reshape(len(key), -1, query.shape[-1])
        scores = torch.matmul(grouped, key.transpose(1, 2)).view(len(query), -1, context)
        scores = rule.capped(scores)
        if call.window is not None:
            hidden = places <= call.rows[block, None] - call.window
            scores = scores.masked_fill(hidden, float("-inf"))
        paid += rule.weights(scores).nan_to_num(0.0).sum(dim=(0, 1))
    return paid / (len(call.query[0]) * count)


METHOD = Method("prophetkv", score=score)
