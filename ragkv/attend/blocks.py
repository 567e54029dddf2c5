"""Sparse attention of an answer's steps: of a long context they read the blocks that match."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.observe import LayerCall, attention_by_head
from ragkv.attend.representatives import REPRESENTATIVES
from ragkv.attend.rows import Rows, attend
from ragkv.attend.score_rule import ScoreRule
from ragkv.config.sparse import SPARSE_PRESETS, SparseDecoding
from ragkv.model.loaded import ReusableModel


@dataclass(slots=True, eq=False)
class _Layer:
    """One layer's blocks.

    ``table``: representatives of the first blocks, ``[kv_heads, blocks, entries, width]``.
    ``chosen``: ``[kv_heads, blocks]``, ascending. ``rewritten``: blocks with newer keys.
    ``votes``: ``[kv_heads, tokens]``, the attention that the prompt's last tokens pay.
    """

    table: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    rewritten: set[int] = field(default_factory=set)
    votes: torch.Tensor | None = None


class BlockAttention:
    """The blocks of one prompt and its answer, and the attention of the answer's steps.

    Attributes
    ----------
    blocks, read
        Blocks that the steps so far could read, and those that they read, over all layers.
    """

    def __init__(self, settings: SparseDecoding, layers: int) -> None:
        self.blocks = self.read = 0
        self.first_layer = settings.dense_layer_num
        self._settings = settings
        self._representative = REPRESENTATIVES[settings.representative]
        self._layers = [_Layer() for _ in range(layers)]
        self._step, self._count = -1, 0
        self._everything = True
        self._moved: Rows | None = None
        self._last: tuple[int, torch.Tensor] | None = None

    @property
    def needs_votes(self) -> bool:
        """Whether :meth:`vote` has to observe the prompt's last tokens before the first step."""
        return self._representative.needs_votes or self._settings.preselect_block_count > 0

    def vote(self, call: LayerCall) -> None:
        """Observe a layer of a pass over the prompt's last tokens."""
        self._layers[call.layer].votes = attention_by_head(call)

    def begin(self, repaired: npt.NDArray[np.int64], first: int) -> None:
        """Prepare for a step over the rows from position ``first`` on, and ``repaired`` ones.

        A step that repairs some of the context reads everything.
        """
        settings = self._settings
        middle = first + 1 - settings.initial_window - settings.local_window
        self._count = max(0, middle // settings.block_size)
        blocks = set(((repaired - settings.initial_window) // settings.block_size).tolist())
        for layer in self._layers:
            layer.rewritten |= blocks
        self._everything = bool(blocks) or self._count <= self._wanted
        self._step += 1
        self._moved = self._last = None

    @property
    def _wanted(self) -> int:
        return self._settings.second_block_count + self._settings.preselect_block_count

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Rows,
        scaling: float,
        score_rule: ScoreRule | None = None,
    ) -> torch.Tensor:
        """Attend, ``[1, heads, rows, head_dim]``, as :func:`ragkv.attend.rows.attend` does."""
        self.blocks += self._count
        self.read += self._count if self._everything else self._wanted
        if not self._everything:
            chosen = self._choose(layer, query[0] * scaling, key[0])
            key, value = self._gather(key, chosen), self._gather(value, chosen)
            if self._moved is None:  # what is read stands closer together
                away = (self._count - self._wanted) * self._settings.block_size
                self._moved = Rows(rows.places - away, rows.positions - away)
            rows = self._moved
        return attend(query, key, value, rows, None, scaling, score_rule=score_rule)

    def _choose(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return a layer's blocks, ``[kv_heads, blocks]`` int64, ascending.

        ``query`` is ``[heads, rows, head_dim]``, scaled, ``key`` ``[kv_heads, tokens, head_dim]``.
        """
        known, settings = self._layers[layer], self._settings
        if self._last is not None and layer - self._last[0] < settings.layer_step:
            return self._last[1]
        if known.chosen is None or self._step % settings.token_step == 0:
            table = self._table(known, key)
            rows = self._representative.query(query.reshape(len(key), -1, query.shape[-1]))
            scores = torch.matmul(rows, table.flatten(1, 2).transpose(1, 2))
            scores = scores.unflatten(2, (self._count, -1)).amax(dim=3)
            # heads agree by shares of attention, as their scores differ in scale
            shares = torch.softmax(scores, dim=2).sum(dim=1)
            if settings.head_select_mode == "shared":
                shares = shares.sum(dim=0, keepdim=True).expand(len(key), -1).clone()
            if known.votes is not None and settings.preselect_block_count:
                paid = self._in_blocks(known.votes[..., None])[..., 0].amax(dim=2)
                best = paid.topk(settings.preselect_block_count, dim=1).indices
                shares.scatter_(1, best, torch.inf)
            known.chosen = shares.topk(self._wanted, dim=1).indices.sort(dim=1).values
        self._last = layer, known.chosen
        return known.chosen

    def _table(self, known: _Layer, key: torch.Tensor) -> torch.Tensor:
        """Return a layer's representatives, brought up to date."""
        have = 0 if known.table is None else known.table.shape[1]
        blocks = self._in_blocks(key)
        votes = None if known.votes is None else self._in_blocks(known.votes[..., None])[..., 0]

        def made(some: slice) -> torch.Tensor:
            return self._representative.table(
                blocks[:, some], None if votes is None else votes[:, some]
            )

        if known.table is None:
            known.table = made(slice(0, self._count))
        elif have < self._count:
            known.table = torch.cat([known.table, made(slice(have, self._count))], dim=1)
        for block in known.rewritten:
            if 0 <= block < have:
                known.table[:, block] = made(slice(block, block + 1))[:, 0]
        known.rewritten.clear()
        return known.table

    def _in_blocks(self, part: torch.Tensor) -> torch.Tensor:
        """Return the middle of ``[kv_heads, tokens, …]`` as ``[kv_heads, blocks, size, …]``."""
        begin, size = self._settings.initial_window, self._settings.block_size
        return part[:, begin : begin + self._count * size].unflatten(1, (self._count, size))

    def _gather(self, part: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Copy both windows and the chosen blocks of ``[1, kv_heads, tokens, head_dim]``."""
        blocks, begin = self._in_blocks(part[0]), self._settings.initial_window
        end = begin + self._count * self._settings.block_size
        before = begin + self._wanted * self._settings.block_size
        _, heads, tokens, width = part.shape
        out = part.new_empty(1, heads, before + tokens - end, width)
        out[:, :, :begin], out[:, :, before:] = part[:, :, :begin], part[:, :, end:]
        for head, own in enumerate(chosen):
            into = out[0, head, begin:before].view(len(own), -1)
            torch.index_select(blocks[head].flatten(1), 0, own, out=into)
        return out


def blocks_for(
    loaded: ReusableModel, sparse: str | SparseDecoding, tokens: int
) -> BlockAttention | None:
    """Return what the steps behind a prompt of so many tokens read; None for everything."""
    if sparse == "off":
        return None
    settings = sparse if isinstance(sparse, SparseDecoding) else SPARSE_PRESETS[sparse]
    return BlockAttention(settings, loaded.architecture.layers)
