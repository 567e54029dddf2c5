"""Drift: what neighbouring tokens have in common when their chunk comes into a prompt.

A token's key and value in the real prompt differ from the cached ones, because it now sees
the chunks before its own. Neighbours differ alike, and a chunk's first tokens differ most.
The recomputed tokens show by how much, layer by layer and at no cost; the tokens that are
not recomputed are moved by what these let expect (simple kriging: the best linear guess).
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
from ragkv.model.rotary import rotate, unrotate
from ragkv.splice.layout import Layout

# Shares of what a token moves by, squared: what it has in common with all chunks, with its
# own, with tokens near and very near (share, tokens within which that falls to 1/e), and
# with none. How they were measured: docs/log.md.
SHARED = 0.2
CHUNK = 0.1
NEAR = ((0.1, 40.0), (0.2, 3.0))
OWN = 0.45

EARLY_TOKENS = 20
"""A chunk's token ``i`` moves by ``g_i = (1 + i / 20) ** -0.5`` of what its first one does."""

STRETCH_TOKENS = 512
"""Tokens further apart, in a longer chunk, say no more of each other than other chunks'."""


class Drift:
    """Moves a layer's unrepaired rows just before its recomputed rows are written.

    A row moves by ``k (K + N)^-1 d``. ``d`` is what the recomputed tokens of its stretch
    moved by, and what all recomputed tokens have in common, ``sum g_i d_i / sum g_i^2``.
    ``K`` holds the covariances among these, and ``k`` those of the row with them: between
    tokens ``i`` and ``j`` ``g_i g_j (SHARED + CHUNK + sum a exp(-|i - j| / t))``, and
    ``g_i SHARED`` with what is common. ``N`` is ``OWN g_i^2``, and for what is common the
    variance of a mean. One set of weights serves all layers and heads. Keys are compared
    and moved unrotated.

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
        stretches = list(_stretches(layout, rows))
        told = np.concatenate([_NOTHING, *(part.told for part in stretches)])
        chunks = len({part.chunk for part in stretches if len(part.told)})
        places = np.concatenate([_NOTHING, *(part.places[part.known] for part in stretches)])
        sizes = _sizes(places)
        self._common = (sizes / sizes.square().sum()).to(device)
        self._seen = torch.from_numpy(told).to(device)
        self._here = torch.from_numpy(rows[told]).to(device)
        self._weights: list[tuple[slice, slice, torch.Tensor]] = []
        first = 0
        for part in stretches if len(told) else ():
            positions = slice(part.start, part.start + len(part.places))
            known = slice(first, first + len(part.told))
            weights = _weights(part, chunks, len(told)).to(device)
            self._weights.append((positions, known, weights))
            first = known.stop

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
        moved_keys = unrotate(self._moved(keys, fresh[0]), here)
        expected = self._expected(torch.cat([moved_keys, self._moved(values, fresh[1])]))
        heads = len(keys)
        keys += rotate(expected[:heads], table)
        values += expected[heads:]

    def _moved(self, rows: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        before, after = rows.index_select(1, self._here), fresh.index_select(1, self._seen)
        return after.float() - before.float()

    def _expected(self, moved: torch.Tensor) -> torch.Tensor:
        """Return by what each position moves, ``[heads, end, head_dim]``."""
        heads, _, width = moved.shape
        known = moved.transpose(0, 1).reshape(-1, heads * width)
        common = (self._common @ known)[None]
        out = known.new_zeros(self._end, heads * width)
        for positions, part, weights in self._weights:
            torch.mm(weights, torch.cat([known[part], common]), out=out[positions])
        return out.view(self._end, heads, width).transpose(0, 1)


class _Stretch(NamedTuple):
    """Neighbouring positions of a chunk.

    Attributes
    ----------
    chunk, start
        The chunk's number and the first position.
    places
        ``[positions]`` each one's place in the chunk.
    told
        ``[known]`` which of the pass's rows are cached tokens of the stretch.
    known
        ``[known]`` their indices in ``places``.
    """

    chunk: int
    start: int
    places: npt.NDArray[np.int64]
    told: npt.NDArray[np.int64]
    known: npt.NDArray[np.int64]


_NOTHING = np.empty(0, dtype=np.int64)


def _stretches(layout: Layout, rows: npt.NDArray[np.int64]) -> Iterator[_Stretch]:
    for number, piece in enumerate(layout.placed):
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
            known = rows[told] - start
            yield _Stretch(number, start, places[first : first + STRETCH_TOKENS], told, known)


def _sizes(places: npt.NDArray[np.int64]) -> torch.Tensor:
    return torch.rsqrt(1 + torch.from_numpy(places) / EARLY_TOKENS)


def _weights(stretch: _Stretch, chunks: int, tokens: int) -> torch.Tensor:
    """Return ``[positions, known + 1]``: what each takes from each, and from the common.

    ``chunks`` and ``tokens`` are what the common part is the mean of.
    """
    steps = torch.arange(len(stretch.places), dtype=torch.float32)
    alike = torch.full_like(steps, SHARED + CHUNK)
    for share, within in NEAR:
        alike += share * torch.exp(-steps / within)
    size, known = _sizes(stretch.places), torch.from_numpy(stretch.known)
    apart = (torch.arange(len(size))[:, None] - known).abs()
    covariance = torch.cat(
        [alike[apart] * size[:, None] * size[known], SHARED * size[:, None]], dim=1
    )
    alone = OWN + sum(share for share, _ in NEAR)
    common = SHARED + CHUNK / chunks + alone / tokens
    among = torch.cat(
        [covariance[known], torch.cat([SHARED * size[known], torch.tensor([common])])[None]]
    )
    among.diagonal()[:-1] += OWN * size[known].square()
    weights: torch.Tensor = torch.linalg.solve(among, covariance, left=False)
    return weights
