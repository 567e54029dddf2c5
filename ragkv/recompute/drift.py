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

# Shares of what a token moves by, squared: what it has in common with all of its chunk, with
# tokens near and very near (share, tokens within which that falls to 1/e), and with none.
# How they were measured: docs/log.md.
CHUNK = 0.25
NEAR = ((0.1, 40.0), (0.2, 3.0))
OWN = 0.45

EARLY_TOKENS = 20
"""A chunk's token ``i`` moves by ``(1 + i / 20) ** -0.5`` of what its first one does."""

STRETCH_TOKENS = 512
"""Tokens further apart, in a longer chunk, say nothing of each other."""


class Drift:
    """Moves a layer's unrepaired rows just before its recomputed rows are written.

    By ``k (K + N)^-1 d``, where ``d`` is what the recomputed tokens of the stretch moved
    by, ``K`` holds the covariances among these and ``k`` those of the row with them: for
    tokens ``i`` and ``j`` of a stretch ``g_i g_j (CHUNK + sum a exp(-|i - j| / t))`` with
    ``g_i = (1 + i / 20) ** -0.5``. ``N = diag(OWN g_i ** 2)``. One set of weights serves
    all layers and heads. Keys are compared and moved unrotated.

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
        self._stretches: list[_Stretch] = []
        seen: list[npt.NDArray[np.int64]] = []
        count = 0
        for start, at, told in _stretches(layout, rows):
            known = slice(count, count + len(told))
            weights = _weights(at, rows[told] - start).to(device)
            self._stretches.append(_Stretch(slice(start, start + len(at)), known, weights))
            seen.append(told)
            count = known.stop
        told = np.concatenate([*seen, np.empty(0, dtype=np.int64)])
        self._seen = torch.from_numpy(told).to(device)
        self._here = torch.from_numpy(rows[told]).to(device)

    def __call__(
        self,
        layer: int,
        rows: tuple[torch.Tensor, torch.Tensor],
        fresh: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Move the chunks' rows in place; see :class:`ragkv.splice.buffer.BeforeWrite`."""
        if not self._stretches:
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
        out = known.new_zeros(self._end, heads * width)
        for stretch in self._stretches:
            torch.mm(stretch.weights, known[stretch.known], out=out[stretch.positions])
        return out.view(self._end, heads, width).transpose(0, 1)


class _Stretch(NamedTuple):
    """Neighbouring positions, the rows of all known ones that are theirs, the weights."""

    positions: slice
    known: slice
    weights: torch.Tensor


def _stretches(
    layout: Layout, rows: npt.NDArray[np.int64]
) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield each stretch in which something is recomputed.

    Its first position; ``[positions]`` each one's place in the chunk; ``[told]`` indices
    into ``rows`` of its cached tokens that are recomputed.
    """
    for piece in layout.placed:
        cached = piece.slots >= layout.exact
        slots, places = piece.slots[cached], piece.rows[cached]
        if not len(slots):
            continue
        # the chunk's fresh tokens stand between; they are computed, whatever they move by
        at = np.zeros(slots[-1] + 1 - slots[0], dtype=np.int64)
        at[slots - slots[0]] = places
        found = np.flatnonzero(np.isin(rows, slots))
        for first in range(0, len(at), STRETCH_TOKENS):
            start = int(slots[0]) + first
            told = found[(rows[found] >= start) & (rows[found] < start + STRETCH_TOKENS)]
            if len(told):
                yield start, at[first : first + STRETCH_TOKENS], told


def _weights(at: npt.NDArray[np.int64], told: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return ``[positions, told]``: what each position takes from each recomputed one."""
    steps = torch.arange(len(at), dtype=torch.float32)
    alike = torch.full_like(steps, CHUNK)
    for share, within in NEAR:
        alike += share * torch.exp(-steps / within)
    size = torch.rsqrt(1 + torch.from_numpy(at) / EARLY_TOKENS)
    known = torch.from_numpy(told)
    apart = (torch.arange(len(at))[:, None] - known).abs()
    covariance = alike[apart] * size[:, None] * size[known]
    among = covariance[known] + torch.diag(OWN * size[known].square())
    weights: torch.Tensor = torch.linalg.solve(among, covariance, left=False)
    return weights
