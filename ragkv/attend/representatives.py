"""What stands for the keys of a block, and how a query is scored against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ENTRIES = 8
"""Keys that stand for a block where they are keys of its own."""


@dataclass(frozen=True, slots=True)
class Representative:
    """A kind of representative: a block's score is the largest product of query and entry.

    Attributes
    ----------
    table
        Takes keys ``[kv_heads, blocks, block_size, head_dim]`` and the attention paid to them by
        the prompt's last tokens ``[kv_heads, blocks, block_size]``, or None; returns entries
        ``[kv_heads, blocks, entries, width]``.
    query
        Takes scaled queries ``[kv_heads, rows, head_dim]``; returns ``[kv_heads, rows, width]``.
    needs_votes
        Whether the attention paid has to be known.
    """

    table: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    query: Callable[[torch.Tensor], torch.Tensor] = lambda query: query
    needs_votes: bool = False


def _mean(keys: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return keys.mean(dim=2, keepdim=True)


def _max(keys: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return keys.amax(dim=2, keepdim=True)


def _mean_and_variance(keys: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    variance, mean = torch.var_mean(keys, dim=2, correction=0, keepdim=True)
    return torch.cat([mean, variance / 2], dim=-1)


def _most_and_least(keys: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return torch.cat([*keys.aminmax(dim=2, keepdim=True)], dim=-1)


def _fixed(keys: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return keys[:, :, :: max(1, keys.shape[2] // ENTRIES)]


def _dynamic(keys: torch.Tensor, paid: torch.Tensor | None) -> torch.Tensor:
    if paid is None:
        raise ValueError("the attention paid to the keys is not known")
    best = paid.topk(min(ENTRIES, keys.shape[2]), dim=-1).indices
    return keys.gather(2, best[..., None].expand(-1, -1, -1, keys.shape[3]))


REPRESENTATIVES = {
    # the logarithm of a block's mean weight, were each channel of its keys normal and independent
    "meanstd": Representative(_mean_and_variance, lambda q: torch.cat([q, q * q], dim=-1)),
    "mean": Representative(_mean),
    "max": Representative(_max),
    # an upper bound of every key's score
    "quest": Representative(
        _most_and_least, lambda q: torch.cat([q.clamp_max(0), q.clamp_min(0)], dim=-1)
    ),
    "fixed": Representative(_fixed),
    "dynamic": Representative(_dynamic, needs_votes=True),
}
