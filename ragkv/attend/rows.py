"""Attention of scattered query rows over the whole KV, with an exact limit for each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from ragkv.attend.kernels import attend_by_kernel, suits_kernels
from ragkv.attend.score_rule import ScoreRule
from ragkv.model.implementation import implementation_for, products
from ragkv.model.streams import to_device

_ROW_BLOCK_CPU, _ROW_BLOCK_GPU = 64, 1024
_ROW_BLOCK_NARROW = 192  # on a CPU, for 16-bit numbers: from here on torch uses larger tiles


def block_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of rows in a block."""
    if device.type != "cpu":
        return _ROW_BLOCK_GPU
    return _ROW_BLOCK_CPU if dtype.itemsize > 2 else _ROW_BLOCK_NARROW


def additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask to add to scores: -inf where ``hidden`` is True, else 0."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))


class Rows:
    """The rows of one pass, in blocks with masks.

    Parameters
    ----------
    places
        ``[rows]`` int64, strictly increasing: position of each query row, on the host, since
        reading numbers from a GPU would synchronise with it.
    positions
        The same, on the model's device.
    """

    def __init__(self, places: npt.NDArray[np.int64], positions: torch.Tensor) -> None:
        self.places = places
        self.positions = positions
        self._blocks: dict[tuple[int | None, torch.dtype], list[Block]] = {}

    @classmethod
    def on(cls, device: torch.device | str, places: npt.NDArray[np.int64]) -> Self:
        """Copy the positions to a device."""
        return cls(places, to_device(places, torch.device(device)))

    def __len__(self) -> int:
        return len(self.places)

    def blocks(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        """Return the blocks for one window and dtype, the same for all layers."""
        if (window, dtype) not in self._blocks:
            self._blocks[window, dtype] = list(self._make(window, dtype))
        return self._blocks[window, dtype]

    def _make(self, window: int | None, dtype: torch.dtype) -> Iterator[Block]:
        device = self.positions.device
        size = block_rows(device, dtype)
        bounds = list(range(0, len(self), size))
        if len(bounds) > 1 and len(self) - bounds[-1] < size // 2:
            bounds.pop()  # few rows are slow apart: they join the block before them
        bounds.append(len(self))
        for first, last in pairwise(bounds):
            high = int(self.places[last - 1]) + 1
            low, masked = 0, int(self.places[first]) + 1
            if window is not None:
                low = masked = max(0, masked - window)
            keys = torch.arange(masked, high, device=device)
            limit = self.positions[first:last, None]
            hidden = keys > limit
            if window is not None:
                hidden |= keys <= limit - window
            yield Block(first, last, low, high, additive(hidden, dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows ``first`` to ``last``, and the mask of their keys ``low`` to ``high``.

    ``mask`` is ``[last - first, masked]`` for the last of these keys: 0 where a row sees a key,
    else -inf. All rows see the keys before them.
    """

    first: int
    last: int
    low: int
    high: int
    mask: torch.Tensor


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Rows,
    window: int | None,
    rule: ScoreRule,
) -> torch.Tensor:
    """Attend with query row i to exactly the keys ``rows[i] - window < j <= rows[i]``.

    Parameters
    ----------
    query
        ``[batch, heads, rows, head_dim]``.
    key, value
        ``[batch, kv_heads, tokens, head_dim]``; key j is at position j.
    rows
        The query rows' positions.
    window
        Number of keys that a row sees, itself included; None is no limit.
    rule
        How products become weights.

    Returns
    -------
    torch.Tensor
        ``[batch, heads, rows, head_dim]``. It is computed in blocks of rows, and each block reads
        only keys that one of its rows can see. On a GPU a kernel computes it if it can.
    """
    # float32 with grouped heads takes torch's slowest path on a GPU, whose scores fill its memory
    is_fast = query.device.type == "cpu" or query.dtype != torch.float32
    if is_fast and rule.is_softmax and window is None and len(rows) == key.shape[2]:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=rule.scaling, enable_gqa=True
        )
    if len(query) == 1 and suits_kernels(query[0], key[0], value[0], rule):
        tensors = query[0], key[0], value[0], rows.positions
        out, _ = attend_by_kernel(*tensors, window=window, rule=rule)
        return out[None]
    if rule.is_softmax and query.device.type != "cpu":
        # with a mask, torch's fast paths have no grouped heads
        key, value = (_each_head(part, query.shape[1]) for part in (key, value))
    blocks = rows.blocks(window, query.dtype)

    def of_block(block: Block) -> torch.Tensor:
        return attend_under(
            block.mask,
            query[:, :, block.first : block.last],
            key[:, :, block.low : block.high],
            value[:, :, block.low : block.high],
            rule,
        )

    if len(blocks) == 1:
        return of_block(blocks[0])
    out = torch.empty_like(query)
    for block in reversed(blocks):  # each fits the freed memory
        out[:, :, block.first : block.last] = of_block(block)
    return out


def attend_under(
    mask: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: ScoreRule,
) -> torch.Tensor:
    """Attend for a block of rows under an additive mask of the last keys, ``[rows, masked]``.

    All rows see the keys before them. In all else it is :func:`attend`.
    """
    if not rule.is_softmax:
        return _attend_by_rule(mask, query, key, value, rule)
    plain = key.shape[2] - mask.shape[1]
    is_onednn = len(query) == 1 and implementation_for("attention", query) == "onednn"
    if query.device.type != "cpu" or (query.shape[2] >= _ROW_BLOCK_CPU and not is_onednn):
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=functional.pad(mask, (plain, 0)),
            scale=rule.scaling,
            enable_gqa=True,
        )
    if not is_onednn:
        # as rows of their KV head, a group's heads read its keys once
        group = query.shape[1] // key.shape[1]
        rows = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        whole = functional.pad(mask, (plain, 0)).repeat(group, 1) if mask.shape[1] else None
        return functional.scaled_dot_product_attention(
            rows, key, value, attn_mask=whole, scale=rule.scaling
        ).view(query.shape)
    grouped = (query[0] * rule.scaling).reshape(len(key[0]), -1, query.shape[-1])
    out: list[torch.Tensor] = []
    first = 0
    for weights in products(grouped, key[0]):
        if mask.shape[1]:
            weights.view(-1, len(mask), key.shape[2])[..., plain:] += mask
        torch.softmax(weights, dim=-1, out=weights)
        values = value[0, first : first + len(weights)]
        out.extend(products(weights, values.transpose(1, 2)))
        first += len(weights)
    return torch.cat(out).view(query.shape)


def _attend_by_rule(
    mask: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: ScoreRule,
) -> torch.Tensor:
    """Attend in float32, one KV head after another to save memory, for few models."""
    out, group = torch.empty_like(query), query.shape[1] // key.shape[1]
    for index in range(key.shape[1]):
        heads, one = slice(index * group, (index + 1) * group), slice(index, index + 1)
        keys, values = key[:, one].float(), value[:, one].float()
        scores = torch.matmul(query[:, heads].float() * rule.scaling, keys.transpose(2, 3))
        scores = rule.capped(scores)
        scores[..., keys.shape[2] - mask.shape[1] :] += mask
        weights = rule.weights(scores, heads)
        out[:, heads] = torch.matmul(weights, values)
    return out


def _each_head(part: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat ``[batch, kv_heads, tokens, head_dim]`` for each query head."""
    return part.repeat_interleave(heads // part.shape[1], dim=1)
