"""Drift: the common shift of neighbouring tokens when their chunk is used in a prompt.

A token's key and value in the real prompt differ from the cached ones, because it attends to the
chunks before its own. Neighbours shift alike, and a chunk's first tokens shift most. The recomputed
tokens show the shift in each layer at no cost; the rest are moved by its best linear prediction
(simple kriging). The query chooses the recomputed tokens, which can shift much more than their
neighbours: no token counts for more than the median. Ratio 1 stays a full prefill and ratio 0 plain
reuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from ragkv_kernels import Stretches, drift

from ragkv.model.loaded import ReusableModel
from ragkv.model.rotary import add_rotated, unrotate
from ragkv.model.streams import all_to_device, to_device
from ragkv.splice.buffer import Shift
from ragkv.splice.layout import Layout, Origin

# Shares of a token's squared shift: common to its whole chunk; common to near and very near
# tokens (share, tokens within which it falls to 1/e); its own. Measured, see docs/log.md.
CHUNK = 0.25
NEAR = ((0.1, 40.0), (0.2, 3.0))
OWN = 0.45

EARLY_TOKENS = 20
"""A chunk's token ``i`` shifts by ``g_i = (1 + i / 20) ** -0.5`` of its first token's shift."""

STRETCH_TOKENS = 512
"""Longer chunks are split into stretches of this length, each predicted separately."""


class Drift:
    """Moves a layer's unrepaired rows just before its recomputed rows are written.

    A row moves by ``k (K + N)^-1 d``: ``d`` are the shifts of the recomputed tokens of its stretch,
    ``K`` the covariances among these and ``k`` those of the row with them. The covariance of tokens
    ``i`` and ``j`` is ``g_i g_j (CHUNK + sum a exp(-|i - j| / t))``, and ``N`` is diagonal,
    ``OWN g_i^2``. One set of weights serves all layers and heads. Keys are compared and moved
    unrotated. A layer's ``d_i``, keys and values separately, are limited to the median length of
    all ``d_i / g_i``.

    Rows recomputed by earlier prompts count as recomputed now, so that stale rows move alike
    regardless of how many prompts recomputed the rest.

    Parameters
    ----------
    layout
        The prompt's layout; exact rows are neither read nor moved.
    rows
        ``[rows]`` sorted positions that the pass computes.
    earlier
        Differences of rows recomputed by earlier prompts from the entries' rows.
    """

    def __init__(
        self,
        layout: Layout,
        rows: npt.NDArray[np.int64],
        loaded: ReusableModel,
        earlier: Shift | None = None,
    ) -> None:
        architecture, rotary, device = loaded.architecture, loaded.rotary, loaded.device
        nothing = np.empty(0, dtype=np.int64)
        known = nothing if earlier is None else earlier.positions
        self._earlier = earlier if len(known) else None
        both = np.concatenate([known, rows])
        order = np.argsort(both)
        self._kinds = architecture.rope_kinds
        self._end = layout.query_start
        self._tables = rotary.tables(self._kinds, torch.arange(self._end, device=device))
        stretches = list(_stretches(layout, both[order]))
        observed = order[np.concatenate([nothing, *(part.observed for part in stretches)])]
        places = np.concatenate([nothing, *(part.places[part.known] for part in stretches)])
        kept = layout.origin[: self._end] >= Origin.EXACT
        self._weights: _PerStretch | None = None
        self._together: Stretches | None = None
        if stretches and _runs_together(device):
            sources = np.where(observed < len(known), ~observed, observed - len(known))
            rows_of = both[observed], sources, kept
            self._together = _together(stretches, places, rows_of, device)
            return
        if stretches:
            self._weights = _PerStretch(stretches, kept)
        now = observed >= len(known)
        self._here = to_device(both[observed], device)
        self._computed = to_device(observed[now] - len(known), device)
        self._replaced = to_device(both[observed[now]], device)
        # rows of earlier prompts and of the pass, in the order of the positions
        self._order: torch.Tensor | None = None
        if not now.all():
            of_earlier = observed[~now]
            self._of_earlier = to_device(of_earlier, device)
            self._order = to_device(np.argsort(np.argsort(now, kind="stable")), device)
        self._sizes = _sizes(to_device(places, device))

    def __call__(
        self,
        layer: int,
        rows: tuple[torch.Tensor, torch.Tensor],
        fresh: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Move the chunks' rows in place; see :class:`ragkv.splice.buffer.BeforeWrite`."""
        keys, values = (part[:, : self._end] for part in rows)
        earlier = None if self._earlier is None else self._earlier.of(layer)
        table = self._tables[self._kinds[layer]]
        if self._together is not None:
            turn = table.cos, table.sin
            drift(
                (keys, values), fresh, earlier, self._together, table=turn, adjacent=table.adjacent
            )
        if self._weights is None:
            return
        of_keys, of_values = (None, None) if earlier is None else earlier
        moved_keys = unrotate(self._moved(keys, fresh[0], of_keys), table.at(self._here))
        both = torch.stack([moved_keys, self._moved(values, fresh[1], of_values)])
        moved = self._bounded(both.permute(2, 0, 1, 3).flatten(2))
        for where, expected in self._weights.times(moved.flatten(1)):
            by_head = expected.view(-1, *both.shape[:2], both.shape[3]).permute(1, 2, 0, 3)
            add_rotated(keys[:, where], by_head[0], table.at(where))
            values[:, where].add_(by_head[1])

    def _moved(
        self, rows: torch.Tensor, fresh: torch.Tensor, earlier: torch.Tensor | None
    ) -> torch.Tensor:
        before = rows[:, self._replaced]  # in a quarter of index_select's time
        moved = fresh[:, self._computed].float() - before.float()
        if earlier is None or self._order is None:
            return moved
        known = earlier.index_select(1, self._of_earlier).float()
        return torch.cat([known, moved], dim=1).index_select(1, self._order)

    def _bounded(self, moved: torch.Tensor) -> torch.Tensor:
        """Limit shifts of keys and of values, ``[known, 2, width]``, to the median length."""
        lengths = torch.linalg.vector_norm(moved, dim=2) / self._sizes[:, None]
        tiny = torch.finfo(lengths.dtype).tiny
        median = lengths.median(dim=0).values
        share = (median / lengths.clamp_min(tiny)).clamp(max=1)
        return torch.mul(moved, share[..., None])


class _Stretch(NamedTuple):
    """Neighbouring positions of a chunk, some of them recomputed.

    Attributes
    ----------
    start
        The first position.
    places
        ``[positions]`` their indices in the chunk.
    observed
        ``[known]`` indices of the recomputed rows that are cached tokens of the stretch.
    known
        ``[known]`` their indices in ``places``.
    """

    start: int
    places: npt.NDArray[np.int64]
    observed: npt.NDArray[np.int64]
    known: npt.NDArray[np.int64]


def _stretches(layout: Layout, rows: npt.NDArray[np.int64]) -> Iterator[_Stretch]:
    for piece in filter(layout.has_stale, layout.placed):
        cached = piece.slots >= layout.exact
        slots = piece.slots[cached]
        if not len(slots):
            continue
        # the chunk's fresh tokens are between these; they are always computed
        places = np.zeros(slots[-1] + 1 - slots[0], dtype=np.int64)
        places[slots - slots[0]] = piece.rows[cached]
        low, high = np.searchsorted(rows, (slots[0], slots[-1] + 1))
        is_cached = np.zeros(len(places), dtype=np.bool_)
        is_cached[slots - slots[0]] = True
        found = low + np.flatnonzero(is_cached[rows[low:high] - slots[0]])
        for first in range(0, len(places), STRETCH_TOKENS):
            start = int(slots[0]) + first
            observed = found[(rows[found] >= start) & (rows[found] < start + STRETCH_TOKENS)]
            if len(observed):
                part = places[first : first + STRETCH_TOKENS]
                yield _Stretch(start, part, observed, rows[observed] - start)


class _PerStretch:
    """Weights of each stretch, multiplied one after another: least arithmetic, for a CPU."""

    def __init__(self, stretches: list[_Stretch], kept: npt.NDArray[np.bool_]) -> None:
        self._parts: list[tuple[slice, slice, torch.Tensor]] = []
        first = 0
        for part in stretches:
            where = slice(part.start, part.start + len(part.places))
            observed = slice(first, first + len(part.observed))
            weights = _weights(torch.from_numpy(part.places), torch.from_numpy(part.known))
            weights[torch.from_numpy(kept[where])] = 0
            self._parts.append((where, observed, weights))
            first = observed.stop

    def times(self, moved: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield positions and their predicted shifts, ``[positions, width]`` float32.

        ``moved`` is ``[known, width]`` float32, stretch by stretch. Kept rows do not shift.
        """
        for where, observed, weights in self._parts:
            yield where, torch.mm(weights, moved[observed])


def _runs_together(device: torch.device) -> bool:
    """Whether to move all stretches together; on a CPU, separately is less arithmetic."""
    return device.type != "cpu"


def _together(
    stretches: list[_Stretch],
    places: npt.NDArray[np.int64],
    observed: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]],
    device: torch.device,
) -> Stretches | None:
    """Return the stretches that have rows to move, padded to one size; None if there is none.

    Parameters
    ----------
    places
        ``[observed]`` each observed row's place in its chunk.
    observed
        The observed rows' positions and sources, and the positions that do not move. Rows of all
        stretches count for the median length.
    """
    firsts = np.cumsum([0, *(len(part.known) for part in stretches)])
    # a stretch that is computed as a whole has no row to move, and would enlarge the others' tables
    moving = [at for at, part in enumerate(stretches) if len(part.known) < len(part.places)]
    if not moving:
        return None
    parts, firsts = [stretches[at] for at in moving], firsts[moving]
    counts = np.array([len(part.known) for part in parts], dtype=np.int64)
    starts = np.array([part.start for part in parts], dtype=np.int64)
    lengths = np.array([len(part.places) for part in parts], dtype=np.int64)
    of_rows = np.zeros((len(parts), lengths.max()), dtype=np.int64)
    known = np.zeros((len(parts), counts.max()), dtype=np.int64)
    for row, part in enumerate(parts):
        of_rows[row, : len(part.places)], known[row, : len(part.known)] = part.places, part.known
    where, sources, fixed = observed
    numbers = of_rows, known, firsts, counts, starts, lengths, where, sources, places
    of_rows_here, known_here, firsts_here, counts_here, *rest = all_to_device(numbers, device)
    starts_here, lengths_here, positions, sources_here, places_here = rest
    real = torch.arange(known.shape[1], device=device) < counts_here[:, None]
    return Stretches(
        _weights(of_rows_here, known_here, real).contiguous(),
        firsts_here,
        counts_here,
        starts_here,
        lengths_here,
        positions,
        sources_here,
        _sizes(places_here),
        to_device(fixed, device),
    )


def _sizes(places: torch.Tensor) -> torch.Tensor:
    """Return ``g`` of places in a chunk, float32."""
    return torch.rsqrt(1 + places.float() / EARLY_TOKENS)


def _weights(
    places: torch.Tensor, known: torch.Tensor, real: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``[..., positions, known]``: each position's weights on the recomputed ones.

    Parameters
    ----------
    places
        ``[..., positions]`` int64, each one's place in the chunk.
    known
        ``[..., known]`` int64 indices in ``places``.
    real
        ``[..., known]`` bool: False is padding, of weight 0.
    """
    size = _sizes(places)
    of_known = size.gather(-1, known)
    steps = torch.arange(places.shape[-1], device=places.device)
    alike = torch.full_like(steps, CHUNK, dtype=torch.float32)
    for share, within in NEAR:
        alike += share * torch.exp(-steps / within)
    apart = (steps[:, None] - known[..., None, :]).abs()
    covariance = alike[apart] * size[..., None] * of_known[..., None, :]
    among = covariance.gather(-2, known[..., None].expand(*known.shape, known.shape[-1]))
    noise = OWN * of_known.square()
    if real is not None:
        covariance *= real[..., None, :]
        among *= real[..., None, :] & real[..., None]
        noise = noise.where(real, 1.0)
    among += torch.diag_embed(noise)
    # positive definite by construction; checking would make a GPU wait
    factor = torch.linalg.cholesky_ex(among).L
    half = torch.linalg.solve_triangular(factor.mT, covariance, upper=True, left=False)
    weights: torch.Tensor = torch.linalg.solve_triangular(factor, half, upper=False, left=False)
    return weights
