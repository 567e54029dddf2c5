"""Sparse attention of an answer's steps: they read the best blocks of a long context."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.rows import Rows, attend
from ragkv.attend.score_rule import ScoreRule
from ragkv.config.decode import SparseDecoding
from ragkv.model.loaded import ReusableModel

BLOCK_SIZE = 16
"""Number of tokens in a block."""

TOKEN_STEP = 2
"""Number of steps from one choice of blocks to the next."""

LEAST_SKIPPED = 6 << 20
"""Fewest skipped bytes of a layer for ``"auto"``: choosing takes as long as reading 4 MB."""


@dataclass(slots=True, eq=False)
class _Layer:
    """One layer's blocks.

    ``table``: the first blocks' :func:`_bounds`, ``[kv_heads, blocks, 2 * head_dim]``. ``chosen``:
    ``[kv_heads, blocks]``, ascending. ``rewritten``: blocks with newer keys.
    """

    table: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    rewritten: set[int] = field(default_factory=set)


class BlockAttention:
    """The blocks of one prompt and its answer, and the attention of the answer's steps.

    Attributes
    ----------
    blocks, read
        Numbers of blocks that the steps so far could read, and that they read, over all layers.
    """

    def __init__(self, settings: SparseDecoding, layers: int) -> None:
        self.blocks = self.read = 0
        self._settings = settings
        self._layers = [_Layer() for _ in range(layers)]
        self._step, self._count = -1, 0
        self._everything = True
        self._moved: Rows | None = None
        self._counted = set[int]()

    def begin(self, repaired: npt.NDArray[np.int64], first: int) -> None:
        """Prepare for a step over the rows from position ``first`` on, and ``repaired`` ones."""
        settings = self._settings
        middle = first - settings.initial_window - settings.local_window
        self._count = max(0, middle // BLOCK_SIZE)
        blocks = set(((repaired - settings.initial_window) // BLOCK_SIZE).tolist())
        for layer in self._layers:
            layer.rewritten |= blocks
        self._everything = bool(blocks) or self._count < self._wanted
        self._step += 1
        self._moved = None
        self._counted.clear()

    @property
    def _wanted(self) -> int:
        return self._settings.second_block_count

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
        """Attend, ``[1, heads, rows, head_dim]``, as :func:`ragkv.attend.rows.attend` does."""
        if layer not in self._counted:  # a step that failed is computed again
            self._counted.add(layer)
            self.blocks += self._count
            self.read += self._count if self._everything else self._wanted
        if not self._everything:
            chosen = self._choose(self._layers[layer], query[0] * rule.scaling, key[0])
            key, value = self._gather(key, chosen), self._gather(value, chosen)
            if self._moved is None:  # the gathered keys are contiguous
                away = (self._count - self._wanted) * BLOCK_SIZE
                self._moved = Rows(rows.places - away, rows.positions - away)
            rows = self._moved
        return attend(query, key, value, rows, None, rule)

    def _choose(self, known: _Layer, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return a layer's blocks, ``[kv_heads, blocks]`` int64, ascending.

        ``query`` is ``[heads, rows, head_dim]``, scaled, ``key`` ``[kv_heads, tokens, head_dim]``.
        """
        if known.chosen is None or self._step % TOKEN_STEP == 0:
            rows = query.reshape(len(key), -1, query.shape[-1]).float()
            split = torch.cat([rows.clamp(max=0), rows.clamp(min=0)], dim=-1)
            # an upper bound of the scores of a block's keys
            scores = torch.matmul(split, self._table(known, key).transpose(1, 2))
            # heads differ in scale, and agree by shares of attention
            shares = torch.softmax(scores, dim=2).sum(dim=1)
            known.chosen = shares.topk(self._wanted, dim=1).indices.sort(dim=1).values
        return known.chosen

    def _table(self, known: _Layer, key: torch.Tensor) -> torch.Tensor:
        """Return the current bounds of a layer's blocks."""
        blocks = self._in_blocks(key)
        have = 0 if known.table is None else known.table.shape[1]
        if known.table is None:
            known.table = _bounds(blocks)
        elif have < self._count:
            known.table = torch.cat([known.table, _bounds(blocks[:, have:])], dim=1)
        for block in known.rewritten:
            if 0 <= block < have:
                known.table[:, block] = _bounds(blocks[:, block : block + 1])[:, 0]
        known.rewritten.clear()
        return known.table

    def _in_blocks(self, part: torch.Tensor) -> torch.Tensor:
        """Return the middle of ``[kv_heads, tokens, …]`` as ``[kv_heads, blocks, size, …]``."""
        begin = self._settings.initial_window
        middle = part[:, begin : begin + self._count * BLOCK_SIZE]
        return middle.view(len(part), self._count, BLOCK_SIZE, part.shape[2])

    def _gather(self, part: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Copy both windows and the chosen blocks of ``[1, kv_heads, tokens, head_dim]``."""
        blocks, begin = self._in_blocks(part[0]), self._settings.initial_window
        end = begin + self._count * BLOCK_SIZE
        before = begin + self._wanted * BLOCK_SIZE
        _, heads, tokens, width = part.shape
        out = part.new_empty(1, heads, before + tokens - end, width)
        out[:, :, :begin], out[:, :, before:] = part[:, :, :begin], part[:, :, end:]
        for head, own in enumerate(chosen):
            into = out[0, head, begin:before].view(len(own), -1)
            torch.index_select(blocks[head].flatten(1), 0, own, out=into)
        return out


def _bounds(keys: torch.Tensor) -> torch.Tensor:
    """Return the minimum and maximum of each block's keys by channel.

    From ``[kv_heads, blocks, size, head_dim]`` to ``[kv_heads, blocks, 2 * head_dim]`` float32.
    """
    return torch.cat([*keys.float().aminmax(dim=2)], dim=-1)


def blocks_for(
    loaded: ReusableModel, sparse: str | SparseDecoding, tokens: int
) -> BlockAttention | None:
    """Return the sparse attention of steps after a prompt of this length; None for full."""
    layers = loaded.architecture.layers
    if isinstance(sparse, SparseDecoding):
        return BlockAttention(sparse, layers)
    settings = SparseDecoding()
    read = settings.second_block_count * BLOCK_SIZE
    skipped = tokens - settings.initial_window - settings.local_window - read
    nbytes = loaded.architecture.values_per_token * loaded.dtype.itemsize // layers
    pays = skipped * nbytes >= LEAST_SKIPPED and loaded.device.type == "cpu"
    return BlockAttention(settings, layers) if sparse == "auto" and pays else None
