"""What stands for the keys of a block, and how a query is scored against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Representative:
    """A block's score is the product of what ``table`` makes of its keys and ``query`` of a query.

    Attributes
    ----------
    table
        From keys ``[kv_heads, blocks, block_size, head_dim]`` to ``[kv_heads, blocks, width]``
        float32.
    query
        From scaled queries ``[kv_heads, rows, head_dim]`` float32 to ``[kv_heads, rows, width]``.
    """

    table: Callable[[torch.Tensor], torch.Tensor]
    query: Callable[[torch.Tensor], torch.Tensor]


def _mean_and_variance(keys: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(keys.float(), dim=2, correction=0)
    return torch.cat([mean, variance / 2], dim=-1)


def _least_and_most(keys: torch.Tensor) -> torch.Tensor:
    return torch.cat([*keys.float().aminmax(dim=2)], dim=-1)


REPRESENTATIVES = {
    # the logarithm of a block's mean weight, were its keys' channels normal and independent
    "meanstd": Representative(_mean_and_variance, lambda q: torch.cat([q, q * q], dim=-1)),
    # an upper bound of its keys' scores
    "quest": Representative(
        _least_and_most, lambda q: torch.cat([q.clamp(max=0), q.clamp(min=0)], dim=-1)
    ),
}
