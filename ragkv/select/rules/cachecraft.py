"""The tokens with most attention to earlier chunks, more of them in more dependent chunks.

Cache-Craft, arXiv 2502.15734: of chunk Ci the ``ceil(CFO |Ci|)`` tokens with the highest
attention to earlier chunks are recomputed, where CFO, the cache fix overhead, is alpha times
that of the version in use (:mod:`ragkv.store.version`). With a given ``recompute_ratio`` alpha
follows from it; with ``"auto"`` it is :data:`ragkv.select.choose.ALPHA`.

The paper caches chunks from whole prompts, so every cached chunk has a CFO and ranks. An entry was
computed at ingestion, without a context, and has neither. Instead:

- Its CFO is the paper's formula for a chunk behind no other: CCI is 1/2 without a context, and
  nothing of its prefix is kept, so it is alpha / 2. No pass is needed.
- Its tokens are ranked as in the paper, by their attention to the chunks before them in this
  prompt, but only in the first tenth of the layers: a pass over the whole prompt ends there. As
  with CacheBlend, its rows stay in the cache.

Versions have the figures of their capture, and a prompt with only versions needs no pass.

The paper's focused chunks, which end the repair of other chunks between the layers, are left out:
a lower ratio costs less error for the same time (docs/log.md).
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.observe import LayerCall, StopPass, attention_to_groups
from ragkv.chunk.kv import KnownChunk
from ragkv.select.method import FloatArray, Method, Scene
from ragkv.splice.layout import Placed
from ragkv.store.version import NO_CONTEXT, PlacedVersion

_FIRST_CHUNK_LAST = 2.0
"""CFO of entries is 1/2, so every other score of theirs is above minus this."""

_LEAST_OVERHEAD = 1e-3
"""Tokens of a chunk with less overhead at alpha 1 come after those of other chunks."""

_Figures = tuple[npt.NDArray[np.int64], float]
"""Each placed token's rank, from 0, and the chunk's CFO at alpha 1."""


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]``: ``-(r / |Ci|) / CFO_i`` for the token of rank r, from 0, in Ci.

    CFO is that at alpha 1. The tokens with a score above -alpha are, in every chunk, the first
    ``ceil(min(1, alpha CFO) |Ci|)``. The first chunk has no earlier one and comes last.
    """
    first, *others = scene.layout.placed
    known = [_of_version(piece) for piece in others]
    ranks = _ranks(scene) if None in known else []
    parts = []
    for at, figures in enumerate(known):
        rank, overhead = (ranks[at], NO_CONTEXT) if figures is None else figures
        parts.append(_scores(rank, overhead))
    head = _of_version(first)
    if head is None:
        least = min((float(part.min()) for part in parts), default=0.0)
        below = max(_FIRST_CHUNK_LAST, math.ceil(-least))
        return _joined([_scores(np.arange(len(first.rows)), NO_CONTEXT) - below, *parts])
    return _joined([_scores(*head), *parts])


def _joined(parts: list[npt.NDArray[np.float64]]) -> FloatArray:
    return np.concatenate(parts).astype(np.float32)


def _scores(ranks: npt.NDArray[np.int64], overhead: float) -> npt.NDArray[np.float64]:
    shares = ranks / len(ranks)
    if overhead < _LEAST_OVERHEAD:
        return -(1 + shares) / _LEAST_OVERHEAD
    return -shares / overhead


def _of_version(piece: Placed) -> _Figures | None:
    """Return the figures of a chunk's version; None for an entry.

    A chunk whose rows earlier prompts computed has overhead 0.
    """
    placed = piece.entry
    if isinstance(placed, KnownChunk):
        return np.arange(len(piece.rows)), 0.0
    if not isinstance(placed, PlacedVersion):
        return None
    return np.argsort(np.argsort(placed.version.ranks[piece.rows])), placed.overhead


def _ranks(scene: Scene) -> list[npt.NDArray[np.int64]]:
    """Rank the tokens of each chunk but the first by their attention to all chunks before it."""
    slots = [piece.slots for piece in scene.layout.placed]
    layers = min(scene.layers, max(2, math.ceil(scene.layers / 10)))
    chunks = np.zeros((len(scene.layout), len(slots)), dtype=np.float32)
    for index, rows in enumerate(slots):
        chunks[rows, index] = 1.0
    member = torch.from_numpy(chunks).to(scene.cache.device)
    paid = torch.zeros_like(member)

    def observe(call: LayerCall) -> None:
        paid.add_(attention_to_groups(call, member))
        if call.layer == layers - 1:
            raise StopPass

    scene.observe(observe, rows="all")
    inter = np.cumsum(paid.cpu().numpy(), axis=1)
    order = [np.argsort(-inter[rows, at], kind="stable") for at, rows in enumerate(slots[1:])]
    return [np.argsort(each) for each in order]


METHOD = Method("cachecraft", score=score, auto="overhead")
