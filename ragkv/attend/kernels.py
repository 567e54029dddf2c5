"""Attention by the kernels, where they take what is at hand."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ragkv.attend.scores import Scores
from ragkv.model.implementation import implementation_for


def suits_kernels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: Scores | None = None
) -> bool:
    """Whether ragkv_kernels attends for such tensors.

    Parameters
    ----------
    query
        ``[heads, rows, head_dim]``.
    key, value
        ``[kv_heads, tokens, head_dim]``.
    how
        How scores become weights; the kernels know no cap.
    """
    capped = how is not None and how.softcap is not None
    return not capped and implementation_for("attention", query, key, value) == "kernel"


class ByKernel(NamedTuple):
    """What :class:`ragkv_kernels.Attended` says; ``received`` counts where rows are watched."""

    out: torch.Tensor
    lse: torch.Tensor
    received: torch.Tensor


def attend_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    *,
    window: int | None,
    scaling: float,
    how: Scores | None,
    watch: int = 0,
) -> ByKernel:
    """Attend by ``ragkv_kernels.attend``, and with a model's own sinks.

    What the sinks take is in no row's output, nor in what keys receive, and counts in the
    log-sum-exp.
    """
    import ragkv_kernels

    made = ragkv_kernels.attend(
        query, key, value, rows, window=window, scaling=scaling, lse=True, watch=watch
    )
    if how is None or how.sinks is None:
        return ByKernel(*made)
    mass = how.with_sinks(made.lse)
    out = (made.out * torch.exp(made.lse - mass)[..., None]).to(query.dtype)
    received = made.received
    if watch:
        last = query[:, -watch:], key, rows[-watch:], mass[:, -watch:]
        received = ragkv_kernels.received(*last, window=window, scaling=scaling)
    return ByKernel(out, mass, received)
