"""Attention by ragkv_kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ragkv.attend.score_rule import ScoreRule
from ragkv.model.implementation import implementation_for

if TYPE_CHECKING:
    from ragkv_kernels import RowTable


def suits_kernels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ScoreRule
) -> bool:
    """Whether ragkv_kernels can attend for these tensors.

    Parameters
    ----------
    query
        ``[heads, rows, head_dim]``.
    key, value
        ``[kv_heads, tokens, head_dim]``.
    rule
        How scores become weights; the kernels have no cap.
    """
    uncapped = rule.softcap is None
    return uncapped and implementation_for("attention", query, key, value) == "kernel"


def attend_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    *,
    window: int | None,
    rule: ScoreRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by ``ragkv_kernels.attend``, with a model's learned sinks.

    Returns outputs without the sinks' share, and the log-sum-exp with it.
    """
    import ragkv_kernels

    out, lse = ragkv_kernels.attend(query, key, value, rows, window=window, scaling=rule.scaling)
    return _with_sinks(out, lse, rule)


def attend_by_table(
    query: torch.Tensor,
    table: RowTable,
    layer: int,
    *,
    window: int | None,
    rule: ScoreRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by ``ragkv_kernels.attend_rows``; returns as :func:`attend_by_kernel` does.

    Raises
    ------
    NotImplementedError
        The model caps its scores: the kernels have no cap.
    """
    import ragkv_kernels

    if rule.softcap is not None:
        raise NotImplementedError("a cap on attention's scores")
    rows, scaling = query[0], rule.scaling
    out, lse = ragkv_kernels.attend_rows(rows, table, layer, window=window, scaling=scaling)
    return _with_sinks(out, lse, rule)


def _with_sinks(
    out: torch.Tensor, lse: torch.Tensor, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs without the share of learned sinks, and the log-sum-exp with it."""
    if rule.sinks is None:
        return out, lse
    mass = rule.with_sinks(lse)
    return (out * torch.exp(lse - mass)[..., None]).to(out.dtype), mass
