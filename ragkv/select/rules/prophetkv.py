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

from ragkv.attend.observe import LayerCall, StopPass, attention_to_context
from ragkv.select.method import FloatArray, Method, Scene


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


METHOD = Method("prophetkv", score=score)
