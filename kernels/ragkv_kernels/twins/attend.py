"""Attention of scattered rows in torch, block by block in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_ROW_BLOCK = 128


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    *,
    window: int | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`ragkv_kernels.attend`."""
    heads, rows, _ = query.shape
    values = value.float()
    out = torch.empty_like(query)
    sums = query.new_empty(heads, rows, dtype=torch.float32)
    for block, scores in _blocks(query, key, positions, window, scaling):
        mass = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - mass[..., None])
        sums[:, block] = mass.flatten(0, 1)
        attended = torch.matmul(weights, values[:, None, : scores.shape[-1]])
        out[:, block] = attended.flatten(0, 1).to(out.dtype)
    return out, sums


def paid(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """See :func:`ragkv_kernels.paid`."""
    kv_heads, tokens, _ = key.shape
    most = key.new_zeros(kv_heads, len(query) // kv_heads, tokens, dtype=torch.float32)
    last = torch.zeros_like(most)
    for block, scores in _blocks(query, key, positions, window, scaling):
        mass = lse[:, block].view(*scores.shape[:3], 1)
        weights = torch.exp(scores - mass)
        seen = most[..., : scores.shape[-1]]
        torch.maximum(seen, weights.amax(dim=2), out=seen)
        last = torch.zeros_like(most)
        last[..., : scores.shape[-1]] = weights[:, :, -1]
    return torch.stack([last, most]).mean(dim=(1, 2))


def _blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    scaling: float,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield blocks of rows and scores ``[kv_heads, group, rows, keys up to the last row]``."""
    heads, rows, width = query.shape
    kv_heads = key.shape[0]
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, width)
    keys = key.float().transpose(1, 2)[:, None]
    for first in range(0, rows, _ROW_BLOCK):
        block = slice(first, min(first + _ROW_BLOCK, rows))
        seen = int(positions[block][-1]) + 1
        scores = torch.matmul(grouped[:, :, block].float() * scaling, keys[..., :seen])
        limit = positions[block, None]
        places = torch.arange(seen, device=key.device)
        hidden = places > limit
        if window is not None:
            hidden |= places <= limit - window
        yield block, scores.masked_fill_(hidden, float("-inf"))
