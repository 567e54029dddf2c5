"""Drift: what neighbouring tokens have in common when their chunk comes into a prompt.

A token's key and value in the real prompt differ from the cached ones, because it now sees
the chunks before its own. Neighbours differ alike, and a chunk's first tokens differ most.
The recomputed tokens show by how much, layer by layer and at no cost; the tokens that are
not recomputed are moved by what these let expect (simple kriging: the best linear guess).
What is recomputed is what the query asks about, such as one sentence among others of its
kind, and may move by far more than its neighbours: no token counts for more than the median.
With nothing left to move, or nothing recomputed, nothing changes: ratio 1 stays a full
prefill and ratio 0 plain reuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ragkv.model.load import LoadedModel
from ragkv.model.rotary import add_rotated, unrotate
from ragkv.splice.layout import Layout

# Shares of what a token moves by, squared: what it has in common with all of its chunk, with
# tokens near and very near (share, tokens within which that falls to 1/e), and with none.
# How they were measured: docs/log.md.
CHUNK = 0.25
NEAR = ((0.1, 40.0), (0.2, 3.0))
OWN = 0.45

EARLY_TOKENS = 20
"""A chunk's token ``i`` moves by ``g_i = (1 + i / 20) ** -0.5`` of what its first one does."""

STRETCH_TOKENS = 512
"""Tokens further apart, in a longer chunk, say nothing of each other."""


class Drift:
    """Moves a layer's unrepaired rows just before its recomputed rows are written.

    A row moves by ``k (K + N)^-1 d``: ``d`` is what the recomputed tokens of its stretch
    moved by, ``K`` holds the covariances among these, ``k`` those of the row with them,
    ``g_i g_j (CHUNK + sum a exp(-|i - j| / t))`` for tokens ``i`` and ``j``, and ``N`` is
    diagonal, ``OWN g_i^2``. One set of weights serves all layers and heads. Keys are
    compared and moved unrotated. A layer's ``d_i``, keys and values apart, are shortened to
    the median length of all ``d_i / g_i``.

    Parameters
    ----------
    layout
        The prompt's plan; rows that are exact already are neither looked at nor moved.
    rows
        ``[rows]`` sorted positions that the pass computes.
    """

    def __init__(self, layout: Layout, rows: npt.NDArray[np.int64], loaded: LoadedModel) -> None:
        architecture, rotary, device = loaded.architecture, loaded.rotary, loaded.device
        if architecture is None or rotary is None:
            raise ValueError("drift needs a supported model")
        self._kinds = architecture.rope_kinds
        self._end = layout.query_start
        self._tables = rotary.tables(self._kinds, torch.arange(self._end, device=device))
        self._weights: list[tuple[slice, slice, torch.Tensor]] = []
        width = 2 * architecture.kv_heads * architecture.head_dim
        # for all layers in turn
        self._out = torch.zeros(self._end, width, dtype=torch.float32, device=device)
        told: list[npt.NDArray[np.int64]] = []
        sizes = [torch.empty(0, dtype=torch.float32)]
        first = 0
        for part in _stretches(layout, rows):
            positions = slice(part.start, part.start + len(part.places))
            known = slice(first, first + len(part.told))
            size = torch.rsqrt(1 + torch.from_numpy(part.places).float() / EARLY_TOKENS)
            self._weights.append((positions, known, _weights(part, size).to(device)))
            told.append(part.told)
            sizes.append(size[part.known])
            first = known.stop
        seen = np.concatenate([np.empty(0, dtype=np.int64), *told])
        self._seen = torch.from_numpy(seen).to(device)
        self._here = torch.from_numpy(rows[seen]).to(device)
        self._sizes = torch.cat(sizes).to(device)

    def __call__(
        self,
        layer: int,
        rows: tuple[torch.Tensor, torch.Tensor],
        fresh: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Move the chunks' rows in place; see :class:`ragkv.splice.buffer.BeforeWrite`."""
        if not self._weights:
            return
        keys, values = (part[:, : self._end] for part in rows)
        table = self._tables[self._kinds[layer]]
        here = table[0][self._here], table[1][self._here]
        moved_keys = self._bounded(unrotate(self._moved(keys, fresh[0]), here))
        moved_values = self._bounded(self._moved(values, fresh[1]))
        expected = self._expected(torch.cat([moved_keys, moved_values]))
        heads = len(keys)
        add_rotated(keys, expected[:heads], table)
        values += expected[heads:]

    def _moved(self, rows: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        before, after = rows.index_select(1, self._here), fresh.index_select(1, self._seen)
        return after.float() - before.float()

    def _bounded(self, moved: torch.Tensor) -> torch.Tensor:
        """Shorten what moved by more than the median token."""
        lengths = torch.linalg.vector_norm(moved, dim=(0, 2)) / self._sizes
        tiny = torch.finfo(lengths.dtype).tiny
        share: torch.Tensor = (lengths.median() / lengths.clamp_min(tiny)).clamp(max=1)
        return moved * share[:, None]

    def _expected(self, moved: torch.Tensor) -> torch.Tensor:
        """Return by what each position moves, ``[heads, end, head_dim]``."""
        heads, _, width = moved.shape
        known = moved.transpose(0, 1).reshape(-1, heads * width)
        for positions, part, weights in self._weights:
            torch.mm(weights, known[part], out=self._out[positions])
        return self._out.view(self._end, heads, width).transpose(0, 1)


class _Stretch(NamedTuple):
    """Neighbouring positions of a chunk, some of them recomputed.

    Attributes
    ----------
    start
        The first position.
    places
        ``[positions]`` each one's place in the chunk.
    told
        ``[known]`` which of the pass's rows are cached tokens of the stretch.
    known
        ``[known]`` their indices in ``places``.
    """

    start: int
    places: npt.NDArray[np.int64]
    told: npt.NDArray[np.int64]
    known: npt.NDArray[np.int64]


def _stretches(layout: Layout, rows: npt.NDArray[np.int64]) -> Iterator[_Stretch]:
    for piece in layout.placed:
        cached = piece.slots >= layout.exact
        slots = piece.slots[cached]
        if not len(slots):
            continue
        # the chunk's fresh tokens stand between; they are computed, whatever they move by
        places = np.zeros(slots[-1] + 1 - slots[0], dtype=np.int64)
        places[slots - slots[0]] = piece.rows[cached]
        found = np.flatnonzero(np.isin(rows, slots))
        for first in range(0, len(places), STRETCH_TOKENS):
            start = int(slots[0]) + first
            told = found[(rows[found] >= start) & (rows[found] < start + STRETCH_TOKENS)]
            if len(told):
                part = places[first : first + STRETCH_TOKENS]
                yield _Stretch(start, part, told, rows[told] - start)


def _weights(stretch: _Stretch, size: torch.Tensor) -> torch.Tensor:
    """Return ``[positions, known]``: what each position takes from each recomputed one.

    ``size`` is ``[positions]``, the ``g`` of each.
    """
    steps = torch.arange(len(stretch.places), dtype=torch.float32)
    alike = torch.full_like(steps, CHUNK)
    for share, within in NEAR:
        alike += share * torch.exp(-steps / within)
    known = torch.from_numpy(stretch.known)
    apart = (torch.arange(len(size))[:, None] - known).abs()
    covariance = alike[apart] * size[:, None] * size[known]
    among = covariance[known] + torch.diag(OWN * size[known].square())
    weights: torch.Tensor = torch.linalg.solve(among, covariance, left=False)
    return weights
