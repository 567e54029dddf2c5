"""Attention of scattered query rows over the whole KV, with exact limits per row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from ragkv.model.architecture import backbone_of
from ragkv.select.observe import LayerCall, Observer

NAME = "ragkv"
_ROW_BLOCK_CPU, _ROW_BLOCK_GPU = 128, 1024


@dataclass(slots=True, eq=False)
class Pass:
    """One subset pass: the rows it computes, the layers' windows, and who looks on."""

    rows: torch.Tensor
    windows: tuple[int | None, ...]
    observer: Observer | None = None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """Let query row i see exactly the keys ``rows[i] - window < j <= rows[i]``.

    Parameters
    ----------
    query
        ``[batch, heads, rows, head_dim]``.
    key, value
        ``[batch, kv_heads, tokens, head_dim]``; key j stands at position j.
    rows
        ``[rows]`` int64, strictly increasing: position of each query row.
    window
        Keys that a row sees, itself included; None is no limit.

    Returns
    -------
    torch.Tensor
        ``[batch, heads, rows, head_dim]``. Rows go in blocks; each block reads only the
        keys that one of its rows may see.
    """
    count = rows.shape[0]
    if window is None and count == key.shape[2]:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    positions = torch.arange(key.shape[2], device=key.device)
    bounds = rows.tolist()
    block = _ROW_BLOCK_CPU if key.device.type == "cpu" else _ROW_BLOCK_GPU
    out = torch.empty_like(query)
    for first in range(0, count, block):
        last = min(first + block, count)
        high = bounds[last - 1] + 1
        low = 0 if window is None else max(0, bounds[first] - window + 1)
        limit = rows[first:last, None]
        seen = positions[None, low:high] <= limit
        if window is not None:
            seen &= positions[None, low:high] > limit - window
        out[:, :, first:last] = functional.scaled_dot_product_attention(
            query[:, :, first:last],
            key[:, :, low:high],
            value[:, :, low:high],
            attn_mask=seen,
            scale=scaling,
            enable_gqa=True,
        )
    return out


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    ragkv_pass: Pass | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Entry point that transformers calls under the name ``ragkv``."""
    if ragkv_pass is None or attention_mask is not None:
        raise RuntimeError("the 'ragkv' attention runs inside subset_forward() only")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    window = ragkv_pass.windows[layer]
    if ragkv_pass.observer is not None:
        ragkv_pass.observer(LayerCall(layer, query, key, value, ragkv_pass.rows, window, scaling))
    out = attend(query, key, value, ragkv_pass.rows, window, scaling)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def subset_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch the model to ragkv's attention, and back when the block ends.

    No mask function is registered under the same name, on purpose: transformers then
    makes no mask, and the rows' own positions limit what they see.
    """
    AttentionInterface.register(NAME, _attention_function)
    config = backbone_of(model).config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
