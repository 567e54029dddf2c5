"""Attention by ragkv_kernels."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from ragkv.attend.score_rule import ScoreRule
from ragkv.model.implementation import implementation_for


def suits_kernels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_rule: ScoreRule | None = None
) -> bool:
    """Whether ragkv_kernels attends for such tensors.

    Parameters
    ----------
    query
        ``[heads, rows, head_dim]``.
    key, value
        ``[kv_heads, tokens, head_dim]``.
    score_rule
        How scores become weights; the kernels have no cap.
    """
    capped = score_rule is not None and score_rule.softcap is not None
    return not capped and implementation_for("attention", query, key, value) == "kernel"


class ByKernel(NamedTuple):
    """The fields of :class:`ragkv_kernels.Attended`; ``received`` is for watched rows alone."""

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
    score_rule: ScoreRule | None,
    watch: int = 0,
) -> ByKernel:
    """Attend by ``ragkv_kernels.attend``, and with a model's own sinks.

    The sinks' share is missing from outputs and from received attention, and is included in the
    log-sum-exp.
    """
    import ragkv_kernels

    # both are there: lse is requested, and received is not read without watched rows
    out, lse, received = cast(
        "tuple[torch.Tensor, torch.Tensor, torch.Tensor]",
        ragkv_kernels.attend(
            query, key, value, rows, window=window, scaling=scaling, lse=True, watch=watch
        ),
    )
    if score_rule is None or score_rule.sinks is None:
        return ByKernel(out, lse, received)
    mass = score_rule.with_sinks(lse)
    out = (out * torch.exp(lse - mass)[..., None]).to(query.dtype)
    if watch:
        last = query[:, -watch:], key, rows[-watch:], mass[:, -watch:]
        received = ragkv_kernels.received(*last, window=window, scaling=scaling)
    return ByKernel(out, mass, received)
