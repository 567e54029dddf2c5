"""Observers of a layer's attention during a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from ragkv.attend.kernels import attend_by_kernel, suits_kernels
from ragkv.attend.score_rule import ScoreRule
from ragkv.model.implementation import products

_ROW_BLOCK = 256
"""Rows of a block, whose weights ``[heads, rows, tokens]`` float32 are in memory at once."""


class StopPass(Exception):  # noqa: N818  a signal, not an error
    """Raised by an observer to end the pass at this layer."""


@dataclass(slots=True, eq=False)
class LayerCall:
    """One layer's attention, before it runs.

    Attributes
    ----------
    layer
        Index of the layer.
    query
        ``[1, heads, rows, head_dim]``, rotated.
    key, value
        ``[1, kv_heads, tokens, head_dim]``, rotated; key j is at position j.
    rows
        ``[rows]`` int64: positions of the query rows.
    window
        Number of keys that a row sees, itself included; None is no limit.
    rule
        How products become weights.
    masks
        Additive masks, kept for all layers of a pass with few rows.
    weights
        All heads' weights in parts, ``[some heads, rows, tokens]`` float32 each, if an observer
        computed them for all rows on a CPU: the attention then uses them, and K is read once.
    output
        The attention's output, if a kernel computed it for an observer.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor
    window: int | None
    rule: ScoreRule
    masks: dict[object, torch.Tensor] = field(default_factory=dict)
    weights: tuple[torch.Tensor, ...] = ()
    output: torch.Tensor | None = None

    @property
    def is_computed(self) -> bool:
        """Whether an observer has computed the attention."""
        return bool(self.weights) or self.output is not None

    def attended(self) -> torch.Tensor:
        """Return the attention's output, ``[1, heads, rows, head_dim]``."""
        if self.output is not None:
            return self.output
        if not self.weights:
            raise ValueError("no observer has computed all rows")
        values = self.value[0].float().transpose(1, 2).tensor_split(len(self.weights))
        out = [
            part
            for some, taken in zip(self.weights, values, strict=True)
            for part in products(some.reshape(len(taken), -1, some.shape[-1]), taken)
        ]
        return torch.cat(out).view(self.query.shape).to(self.query.dtype)


Observer = Callable[[LayerCall], None]


def attention_of_last_rows(call: LayerCall, count: int) -> torch.Tensor:
    """Return the attention of the last ``count`` rows, mean over heads and rows.

    Returns
    -------
    torch.Tensor
        ``[tokens]`` float32; sums to one, or less where the model has sinks of its own.
    """
    count = min(count, len(call.rows))
    paid = [part.sum(dim=(0, 1)) for part in _weights(call, slice(-count, None))]
    return torch.stack(paid).sum(dim=0) / (call.query.shape[1] * count)


def attention_of_query(call: LayerCall, count: int) -> torch.Tensor:
    """Return the attention of the last row, and the maximum over the last ``count`` rows.

    Returns
    -------
    torch.Tensor
        ``[2, tokens]`` float32, means over heads. The first row sums to one.
    """
    if (lse := _lse_by_kernel(call)) is not None:
        import ragkv_kernels

        last = call.query[0, :, -count:], call.key[0], call.rows[-count:], lse[:, -count:]
        paid: torch.Tensor = ragkv_kernels.paid(
            *last, window=call.window, scaling=call.rule.scaling
        )
        return paid
    if call.query.device.type == "cpu" and len(call.rows) <= _ROW_BLOCK:
        parts = call.weights = tuple(_weights(call, slice(None)))
    else:
        parts = tuple(_weights(call, slice(-count, None)))
    final = [part[:, -1].sum(dim=0) for part in parts]
    most = [part[:, -count:].amax(dim=1).sum(dim=0) for part in parts]
    return torch.stack([*final, *most]).view(2, len(parts), -1).sum(dim=1) / call.query.shape[1]


def attention_to_groups(call: LayerCall, member: torch.Tensor) -> torch.Tensor:
    """Return each row's attention to each group of tokens, mean over heads.

    Parameters
    ----------
    member
        ``[tokens, groups]`` float32: 1 where the token is in the group, else 0.

    Returns
    -------
    torch.Tensor
        ``[rows, groups]`` float32.
    """
    paid = member.new_empty(len(call.rows), member.shape[1])
    for block, weights in _blocks(call):
        paid[block] = weights @ member[: weights.shape[1]]
    return paid


def _lse_by_kernel(call: LayerCall) -> torch.Tensor | None:
    """Attend by a kernel, keep its output, and return the log-sum-exp ``[heads, rows]``.

    None if no kernel supports these tensors.
    """
    tensors = call.query[0], call.key[0], call.value[0]
    if len(call.query) > 1 or not suits_kernels(*tensors, call.rule):
        return None
    out, lse = attend_by_kernel(*tensors, call.rows, window=call.window, rule=call.rule)
    call.output = out[None]
    return lse


def _blocks(call: LayerCall) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield blocks of rows and their weights ``[rows, keys up to the last row]``."""
    for first in range(0, len(call.rows), _ROW_BLOCK):
        block = slice(first, first + _ROW_BLOCK)
        seen = int(call.rows[block][-1]) + 1
        paid = [part.sum(dim=0) for part in _weights(call, block, seen)]
        yield block, torch.stack(paid).sum(dim=0) / call.query.shape[1]


def _weights(call: LayerCall, block: slice, seen: int | None = None) -> Iterator[torch.Tensor]:
    """Yield ``[some heads, rows, seen]``: a block's weights on the first keys, or on all."""
    query = call.query[0, :, block].float()
    key = call.key[0, :, :seen].float()
    low, mask = _mask(call, block, key.shape[1])
    head = 0
    for scores in products((query * call.rule.scaling).reshape(len(key), -1, key.shape[2]), key):
        part = call.rule.capped(scores.view(-1, query.shape[1], key.shape[1]))
        part[..., low:] += mask
        yield call.rule.weights(part, slice(head, head + len(part)))
        head += len(part)


def _mask(call: LayerCall, block: slice, seen: int) -> tuple[int, torch.Tensor]:
    """Return the number of keys that all rows see, and the additive mask of the others."""
    rows = call.rows[block]
    low = 0
    if call.window is None and rows.device.type == "cpu":  # on a GPU, reading it would wait
        low = min(int(rows[0]) + 1, seen)
    name = block.start, block.stop, seen, call.window
    if name in call.masks:
        return low, call.masks[name]
    positions = torch.arange(low, seen, device=rows.device)
    hidden = positions > rows[:, None]
    if call.window is not None:
        hidden |= positions <= rows[:, None] - call.window
    mask = torch.zeros(hidden.shape, device=rows.device).masked_fill_(hidden, float("-inf"))
    if len(call.rows) <= _ROW_BLOCK:
        call.masks[name] = mask
    return low, mask
