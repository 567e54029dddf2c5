"""Predicted shifts of rows in torch."""

from __future__ import annotations

import torch

from ragkv_kernels.stretches import Stretches
from ragkv_kernels.twins.restore import rotate

Pair = tuple[torch.Tensor, torch.Tensor]


def drift(
    rows: Pair,
    fresh: Pair,
    earlier: Pair | None,
    stretches: Stretches,
    *,
    table: Pair,
    adjacent: bool,
) -> None:
    """See :func:`ragkv_kernels.drift`."""
    cos, sin = table
    keys, values = rows
    scale = cos.square() + sin.square()
    back = (cos / scale)[stretches.positions], (-sin / scale)[stretches.positions]
    moved = [
        _moved(part, new, None if earlier is None else earlier[index], stretches)
        for index, (part, new) in enumerate(zip(rows, fresh, strict=True))
    ]
    moved[0] = rotate(moved[0], *back, adjacent=adjacent)
    bounded = torch.cat([_bounded(part, stretches.sizes) for part in moved])
    expected = _expected(bounded.transpose(0, 1).flatten(1), stretches, keys.shape[1])
    expected = expected.masked_fill(stretches.fixed[:, None], 0)
    expected = expected.view(keys.shape[1], len(bounded), -1).transpose(0, 1)
    turned = rotate(expected[: len(keys)], cos, sin, adjacent=adjacent)
    keys.copy_(keys.float() + turned)
    values.copy_(values.float() + expected[len(keys) :])


def _moved(
    rows: torch.Tensor, fresh: torch.Tensor, earlier: torch.Tensor | None, stretches: Stretches
) -> torch.Tensor:
    """Return ``[kv_heads, observed, head_dim]`` float32: the observed rows' shifts."""
    sources = stretches.sources
    before = rows.index_select(1, stretches.positions).float()
    moved = fresh.index_select(1, sources.clamp_min(0)).float() - before
    if earlier is None:
        return moved
    known = earlier.index_select(1, (~sources).clamp_min(0)).float()
    return torch.where((sources < 0)[:, None], known, moved)


def _bounded(moved: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    lengths = torch.linalg.vector_norm(moved, dim=(0, 2)) / sizes
    return moved * share_of(lengths[None])[0, :, None]


def share_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return the factors, at most 1, that shorten lengths ``[…, observed]`` to their median."""
    tiny = torch.finfo(lengths.dtype).tiny
    median = lengths.median(dim=-1, keepdim=True).values
    return (median / lengths.clamp_min(tiny)).clamp(max=1)


def _expected(moved: torch.Tensor, stretches: Stretches, end: int) -> torch.Tensor:
    """Return ``[end, width]`` float32, the predicted shift of each position."""
    _, length, most = stretches.weights.shape
    number = torch.arange(most, device=moved.device).minimum(stretches.counts[:, None] - 1)
    rows = moved[stretches.firsts[:, None] + number]
    found = torch.bmm(stretches.weights, rows).flatten(0, 1)
    steps = torch.arange(length, device=moved.device)
    at = stretches.starts[:, None] + steps
    real = steps < stretches.lengths[:, None]
    out = moved.new_zeros(end + 1, moved.shape[1])  # padding goes to a row of its own
    out.index_copy_(0, torch.where(real, at, end).view(-1), found)
    return out[:end]
