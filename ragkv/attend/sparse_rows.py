"""Sparse attention of the recomputed rows in the upper layers.

There a recomputed token attends only to tokens that are exact in this prompt (the sink, the first
chunk behind it, and all tokens that the pass computes) and to a few tokens before it in its own
chunk. Most of a pass's attention goes to other cached tokens, which at that depth no longer affect
the query. Fresh tokens, including the query, attend to all. docs/log.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.rows import Rows, additive, attend, attend_under, block_rows
from ragkv.attend.score_rule import ScoreRule
from ragkv.errors import ConfigError
from ragkv.model.loaded import ReusableModel
from ragkv.splice.layout import Layout

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sparse:
    """Recomputed tokens attend sparsely after a share ``after`` of the layers.

    They see the tokens that are exact or computed in this prompt, and ``near`` tokens before
    them in their own chunk.
    """

    after: float
    near: int

    def __post_init__(self) -> None:
        if not (0 <= self.after <= 1 and self.near >= 0):
            raise ConfigError("after is a share of the layers, and near at least 0")


class _Block(NamedTuple):
    """Some of the limited rows, ``first`` to ``last``.

    All of them see the first ``plain`` exact tokens, some see more of the first ``kept``, and
    some see ``near`` stale tokens.
    """

    first: int
    last: int
    near: torch.Tensor
    plain: int
    kept: int


class SparseRows:
    """Sparse attention of one pass's rows in the layers from ``first_layer`` on.

    Parameters
    ----------
    layout
        The prompt's layout.
    rows
        ``[rows]`` sorted positions that the pass computes.
    sparse
        The first layer, and the number of near tokens.
    """

    def __init__(
        self, layout: Layout, rows: Positions, sparse: Sparse, loaded: ReusableModel
    ) -> None:
        device = loaded.device
        # a share such as 7 / 25 can come out a little above its layer
        self.first_layer = math.ceil(sparse.after * loaded.architecture.layers - 1e-9)
        cached = layout.cached
        stale = layout.stale(rows)
        kept = np.setdiff1d(np.arange(len(layout)), stale, assume_unique=True)
        limited = np.isin(rows, cached, assume_unique=True)
        chunks = np.array([piece.slots[0] for piece in layout.placed])
        rows_of_block = rows[limited]
        begin = chunks[np.searchsorted(chunks, rows_of_block, side="right") - 1]
        lowest = np.maximum(begin, rows_of_block - sparse.near)
        self._kept = torch.from_numpy(kept).to(device)
        self._limited = torch.from_numpy(np.flatnonzero(limited)).to(device)
        self._others = torch.from_numpy(np.flatnonzero(~limited)).to(device)
        self._seeing_all = Rows.on(device, rows[~limited])
        self._limited_rows = torch.from_numpy(rows_of_block).to(device)
        self._lowest = torch.from_numpy(lowest).to(device)
        self._blocks: list[_Block] = []
        together = block_rows(device, loaded.dtype)
        for first in range(0, len(rows_of_block), together):
            last = min(first + together, len(rows_of_block))
            near = torch.from_numpy(_near(stale, rows_of_block[first:last], lowest[first:last])).to(
                device
            )
            seen = np.searchsorted(kept, rows_of_block[[first, last - 1]], side="right").tolist()
            self._blocks.append(_Block(first, last, near, *seen))
        self._blocks.reverse()
        self._near = max((len(block.near) for block in self._blocks), default=0)
        self._masks: list[torch.Tensor] | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: ScoreRule,
        *,
        layer: int,
        rows: Rows,
    ) -> torch.Tensor:
        """Attend, ``[1, heads, rows, head_dim]``, as :func:`ragkv.attend.rows.attend` does.

        ``key`` and ``value`` are ``[1, kv_heads, tokens, head_dim]``, ``rows`` those of the pass.
        """
        if layer < self.first_layer:
            return attend(query, key, value, rows, None, rule)
        out = torch.empty_like(query)
        of_others = query.index_select(2, self._others)
        of_others = attend(of_others, key, value, self._seeing_all, None, rule)
        out.index_copy_(2, self._others, of_others)
        # a block's keys are contiguous, near tokens last: blocks are processed backwards, so that
        # near tokens overwrite only kept ones that no later block sees
        room = [
            part.new_empty(*part.shape[:2], len(self._kept) + self._near, part.shape[3])
            for part in (key, value)
        ]
        for seen, part in zip(room, (key, value), strict=True):
            seen[:, :, : len(self._kept)] = part.index_select(2, self._kept)
        limited = query.index_select(2, self._limited)
        for block, mask in zip(self._blocks, self._all_masks(query.dtype), strict=True):
            end = block.kept + len(block.near)
            for seen, part in zip(room, (key, value), strict=True):
                seen[:, :, block.kept : end] = part.index_select(2, block.near)
            rows_of_block = limited[:, :, block.first : block.last]
            keys, values = (seen[:, :, :end] for seen in room)
            rows_of_block.copy_(attend_under(mask, rows_of_block, keys, values, rule))
        return out.index_copy_(2, self._limited, limited)

    def _all_masks(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the blocks' masks, the same for all layers."""
        if self._masks is None:
            self._masks = list(self._make_masks(dtype))
        return self._masks

    def _make_masks(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        for block in self._blocks:
            row, lowest = (
                at[block.first : block.last, None] for at in (self._limited_rows, self._lowest)
            )
            near = (block.near < row) & (block.near >= lowest)
            seen = torch.cat([self._kept[block.plain : block.kept] <= row, near], dim=1)
            yield additive(~seen, dtype)


def _near(stale: Positions, rows: Positions, lowest: Positions) -> Positions:
    """Return the stale tokens that any of the rows sees, from ``lowest`` on."""
    near = stale[slice(*np.searchsorted(stale, (lowest[0], rows[-1])))]
    # of all rows after a token, the next one sees the furthest back
    seen: Positions = near[near >= lowest[np.searchsorted(rows, near)]]
    return seen
