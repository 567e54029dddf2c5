"""The tokens that attend most to earlier chunks, more of them in chunks that depend on these.

Cache-Craft, arXiv 2502.15734: of chunk Ci the ``ceil(CFO |Ci|)`` tokens with the highest
attention to earlier chunks are recomputed, where CFO, the cache fix overhead, is alpha times
that of the version in use (:mod:`ragkv.store.versions`). With a given ``recompute_ratio`` alpha
follows from it; with ``"auto"`` it is :data:`ragkv.select.choose.ALPHA`.

A version has these figures from its capture, and choosing takes no time. A chunk that was cached
alone has none and shares no prefix with the prompt: its CFO is ``alpha CCI``. Those figures come
from a full prefill, run on a copy of the cache.

The repair of chunks that the query does not focus on ends in some layer
(:mod:`ragkv.recompute.focus`); a ratio counts the tokens that are recomputed below it.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.observe import LayerCall, attention_to_groups
from ragkv.select.method import FloatArray, Focus, Method, Scene
from ragkv.splice.layout import Placed
from ragkv.store.versions.version import NO_CONTEXT, PlacedVersion, context_impact

_FIRST_CHUNK_LAST = 2.0
"""CCI is at least 1/2, so every other score of chunks without a version is above minus this."""

_LEAST_OVERHEAD = 1e-3
"""A chunk of less overhead at alpha 1 needs nothing: its tokens come after those of others."""

_Figures = tuple[npt.NDArray[np.int64], float]
"""Each placed token's rank, from 0, and the chunk's CFO at alpha 1."""


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]``: ``-(r / |Ci|) / CFO_i`` for the token of rank r, from 0, in Ci.

    CFO is that at alpha 1. The tokens with a score above -alpha are, in every chunk, the first
    ``ceil(min(1, alpha CFO) |Ci|)``. The first chunk has no earlier one and comes last.
    """
    first, *others = scene.layout.placed
    known = [_of_version(piece) for piece in others]
    measured = _measured(scene) if None in known else []
    figures = [own or measured[at] for at, own in enumerate(known, 1)]
    parts = [_scores(*each) for each in figures]
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
    """Return the figures of a chunk's version; None where it is an entry that is placed."""
    placed = piece.entry
    if not isinstance(placed, PlacedVersion):
        return None
    return np.argsort(np.argsort(placed.version.ranks[piece.rows])), placed.overhead


def _measured(scene: Scene) -> list[_Figures]:
    """Return the figures of all chunks as they are in the prompt, by a full prefill."""
    slots = [piece.slots for piece in scene.layout.placed]
    paid = _paid(scene, slots)
    between = np.array([paid[rows].sum(axis=0) for rows in slots])
    impact = context_impact(between, np.array([len(rows) for rows in slots]))
    ranks = [
        np.argsort(np.argsort(-paid[rows, :index].sum(axis=1), kind="stable"))
        for index, rows in enumerate(slots)
    ]
    return list(zip(ranks, impact.tolist(), strict=True))


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


METHOD = Method(
    "cachecraft",
    score=score,
    auto="overhead",
    reuse="versions",
    focus=Focus(layers=8),
)
