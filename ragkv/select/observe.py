"""Looking at a layer's attention while a pass runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


class StopPass(Exception):  # noqa: N818  a signal, not an error
    """Raised by an observer that has seen all it needs: the pass ends at this layer."""


@dataclass(frozen=True, slots=True, eq=False)
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
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor
    window: int | None
    scaling: float


Observer = Callable[[LayerCall], None]


def attention_of_last_rows(call: LayerCall, count: int) -> torch.Tensor:
    """Return what the last ``count`` rows attend to, mean over heads and rows.

    Returns
    -------
    torch.Tensor
        ``[tokens]`` float32; sums to one.
    """
    query = call.query[0, :, -count:].float()
    key = call.key[0].float()
    rows = call.rows[-count:]
    kv_heads, tokens, head_dim = key.shape
    grouped = query.reshape(kv_heads, -1, head_dim) * call.scaling
    scores = torch.matmul(grouped, key.transpose(1, 2)).view(kv_heads, -1, len(rows), tokens)
    positions = torch.arange(tokens, device=key.device)
    hidden = positions[None] > rows[:, None]
    if call.window is not None:
        hidden |= positions[None] <= rows[:, None] - call.window
    scores.masked_fill_(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1).mean(dim=(0, 1, 2))
