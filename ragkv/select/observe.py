"""Looking at a layer's attention while a pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

_ROW_BLOCK = 256
"""Rows whose weights on all keys are held at once, ``[heads, rows, tokens]`` float32."""


class StopPass(Exception):  # noqa: N818  a signal, not an error
    """Raised by an observer that has seen all it needs: the pass ends at this layer."""


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
        ``[1, kv_heads, tokens, head_dim]``, rotated; key j stands at position j.
    rows
        ``[rows]`` int64: positions of the query rows.
    window
        Keys that a row sees, itself included; None is no limit.
    scaling
        Factor of the scores before the softmax.
    weights
        ``[kv_heads, heads / kv_heads, rows, tokens]`` float32, once an observer has looked at
        all rows on a CPU: the attention itself takes them then, and K is read once.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor
    window: int | None
    scaling: float
    weights: torch.Tensor | None = None

    def attended(self) -> torch.Tensor:
        """Return the attention's output, ``[1, heads, rows, head_dim]``, from the weights."""
        if self.weights is None:
            raise ValueError("nobody has looked at all rows")
        out = torch.matmul(self.weights.flatten(1, 2), self.value[0].float())
        return out.view(self.query.shape).to(self.query.dtype)


Observer = Callable[[LayerCall], None]


def attention_of_last_rows(call: LayerCall, count: int) -> torch.Tensor:
    """Return what the last ``count`` rows attend to, mean over heads and rows.

    Returns
    -------
    torch.Tensor
        ``[tokens]`` float32; sums to one.
    """
    return _weights(call, slice(-count, None), call.key.shape[2]).mean(dim=(0, 1, 2))


def attention_of_query(call: LayerCall, count: int) -> torch.Tensor:
    """Return what the last row pays, and the most that any of the last ``count`` rows pays.

    Returns
    -------
    torch.Tensor
        ``[2, tokens]`` float32, means over heads. The first row sums to one.
    """
    if call.query.device.type == "cpu" and len(call.rows) <= _ROW_BLOCK:
        call.weights = _weights(call, slice(None), call.key.shape[2])
        weights = call.weights[:, :, -count:].flatten(0, 1)
    else:
        weights = _weights(call, slice(-count, None), call.key.shape[2]).flatten(0, 1)
    return torch.stack([weights[:, -1].mean(dim=0), weights.amax(dim=1).mean(dim=0)])


def attention_received(call: LayerCall) -> torch.Tensor:
    """Return what each token receives from all rows together, mean over heads.

    Returns
    -------
    torch.Tensor
        ``[tokens]`` float32; sums to the number of rows.
    """
    received = torch.zeros(call.key.shape[2], dtype=torch.float32, device=call.key.device)
    for _, weights in _blocks(call):
        received[: weights.shape[1]] += weights.sum(dim=0)
    return received


def attention_to_groups(call: LayerCall, member: torch.Tensor) -> torch.Tensor:
    """Return what each row pays to each group of tokens, mean over heads.

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


def _blocks(call: LayerCall) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield blocks of rows and their weights ``[rows, keys up to the last row]``."""
    for first in range(0, len(call.rows), _ROW_BLOCK):
        block = slice(first, first + _ROW_BLOCK)
        seen = int(call.rows[block][-1]) + 1
        yield block, _weights(call, block, seen).mean(dim=(0, 1))


def _weights(call: LayerCall, block: slice, seen: int) -> torch.Tensor:
    """Return ``[kv_heads, heads / kv_heads, rows, seen]``: a block's weights on the first keys."""
    query = call.query[0, :, block].float()
    key = call.key[0, :, :seen].float()
    rows = call.rows[block]
    kv_heads, _, head_dim = key.shape
    grouped = query.reshape(kv_heads, -1, head_dim) * call.scaling
    scores = torch.matmul(grouped, key.transpose(1, 2)).view(kv_heads, -1, len(rows), seen)
    low = 0
    if call.window is None and rows.device.type == "cpu":  # elsewhere asking would wait
        low = int(rows[0]) + 1  # no key before the first row is hidden
    positions = torch.arange(low, seen, device=key.device)
    hidden = positions[None] > rows[:, None]
    if call.window is not None:
        hidden |= positions[None] <= rows[:, None] - call.window
    scores[..., low:].masked_fill_(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1)
