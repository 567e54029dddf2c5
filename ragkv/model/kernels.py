"""Whether the kernels for attention take what is at hand."""

from __future__ import annotations

import torch


def suits_kernels(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ragkv_kernels attends on a GPU for such tensors; they have no gradient.

    Parameters
    ----------
    query
        ``[heads, rows, head_dim]``.
    key, value
        ``[kv_heads, tokens, head_dim]``.
    """
    tensors = query, key, value
    if not query.is_cuda:
        return False
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        return False
    import ragkv_kernels

    return bool(ragkv_kernels.runs_attend(*tensors))
