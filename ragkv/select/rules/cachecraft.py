"""The tokens that attend most to earlier chunks, more of them in chunks that depend on these.

Cache-Craft, arXiv 2502.15734: of chunk Ci the ``ceil(CFO |Ci|)`` tokens with the highest
attention to earlier chunks are recomputed. A chunk that was cached alone shares no prefix
with the prompt, so its cache fix overhead is ``CFO = alpha CCI``; here alpha follows from
``recompute_ratio``. In Cache-Craft these figures are captured when a chunk is first
computed in a real prompt, and ragkv will do the same with contextual versions of a chunk.
Until then they come from a full prefill, run on a copy of the cache: this method measures
the ranking's quality and saves no time.
"""

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.observe import LayerCall, attention_to_groups
from ragkv.select.method import FloatArray, Method, Scene

_FIRST_CHUNK_LAST = 2.0
"""CCI is at least 1/2, so every other score is above minus this."""


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]``: ``-(r / |Ci|) / CCI_i`` for the token of rank r, from 0, in Ci.

    The tokens with a score above -alpha are, in every chunk, the first
    ``ceil(min(1, alpha CCI) |Ci|)``. The first chunk has no earlier one and comes last.
    """
    slots = [piece.slots for piece in scene.layout.placed]
    paid = _paid(scene, slots)
    between = np.array([paid[rows].sum(axis=0) for rows in slots])
    impact = context_impact(between, np.array([len(rows) for rows in slots]))
    parts = []
    for index, rows in enumerate(slots):
        inter = paid[rows, :index].sum(axis=1)
        rank = np.argsort(np.argsort(-inter, kind="stable"))
        parts.append(-rank / len(rows) / impact[index])
    parts[0] -= _FIRST_CHUNK_LAST
    return np.concatenate(parts).astype(np.float32)


def context_impact(
    between: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return ``[chunks]`` the cache context impact, CCI, from 1/2 (no context) to 1.

    ``CCI_i = 1 / (1 + exp(-a / b))`` with ``a = sum over j < i of inter_ij / (|Ci| |Cj|)``
    and ``b = intra_i / |Ci|^2``.

    Parameters
    ----------
    between
        ``[chunks, chunks]``: the attention of all tokens of chunk i to all tokens of chunk
        j, averaged over layers and heads; ``intra`` is its diagonal.
    sizes
        ``[chunks]`` tokens of each chunk.
    """
    density = between / np.outer(sizes, sizes)
    earlier, own = np.tril(density, -1).sum(axis=1), np.diag(density)
    impact: npt.NDArray[np.float64] = 1 / (1 + np.exp(-earlier / np.maximum(own, 1e-30)))
    return impact


def _paid(scene: Scene, slots: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.float64]:
    """Return ``[tokens, chunks]``: a token's attention to a chunk, mean over heads and layers."""
    chunks = np.zeros((len(scene.layout), len(slots)), dtype=np.float32)
    for index, rows in enumerate(slots):
        chunks[rows, index] = 1.0
    member = torch.from_numpy(chunks).to(scene.cache.device)
    total = np.zeros(chunks.shape, dtype=np.float64)

    def observe(call: LayerCall) -> None:
        total[:] += attention_to_groups(call, member).cpu().numpy()

    scene.observe(observe, rows="all", on_copy=True)
    return total / scene.layers


METHOD = Method("cachecraft", source="Cache-Craft, arXiv 2502.15734", score=score)
