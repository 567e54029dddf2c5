"""Attention of scattered query rows over the whole KV, with exact limits per row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from ragkv.model.architecture import backbone_of
from ragkv.recompute.overlap import attend_overlapping
from ragkv.select.observe import LayerCall, Observer
from ragkv.splice.overlap import Overlap

NAME = "ragkv"
_ROW_BLOCK_CPU, _ROW_BLOCK_GPU = 64, 1024
_KEPT_MASK_BYTES = 256 << 20
"""Masks above this are made anew in every layer."""


class Rows:
    """The rows of one pass, in blocks, each with the keys that its rows may see.

    Parameters
    ----------
    positions
        ``[rows]`` int64, strictly increasing: position of each query row.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions
        self._bounds: list[int] = positions.tolist()
        self._blocks: dict[int | None, list[Block]] = {}

    def __len__(self) -> int:
        return len(self._bounds)

    def blocks(self, window: int | None, dtype: torch.dtype) -> Iterable[Block]:
        """Return the blocks for one window; small masks are kept for all layers."""
        if window in self._blocks:
            return self._blocks[window]
        made = self._make(window, dtype)
        if len(self) * (self._bounds[-1] + 1) * dtype.itemsize > _KEPT_MASK_BYTES:
            return made
        self._blocks[window] = list(made)
        return self._blocks[window]

    def _make(self, window: int | None, dtype: torch.dtype) -> Iterator[Block]:
        device = self.positions.device
        size = _ROW_BLOCK_CPU if device.type == "cpu" else _ROW_BLOCK_GPU
        for first in range(0, len(self), size):
            last = min(first + size, len(self))
            high = self._bounds[last - 1] + 1
            low = 0 if window is None else max(0, self._bounds[first] - window + 1)
            keys = torch.arange(low, high, device=device)
            limit = self.positions[first:last, None]
            hidden = keys > limit
            if window is not None:
                hidden |= keys <= limit - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            yield Block(first, last, low, high, mask.masked_fill_(hidden, float("-inf")))


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows ``first`` to ``last`` see keys ``low`` to ``high`` under an additive mask.

    ``mask`` is ``[last - first, high - low]``: 0 where a row sees a key, else -inf.
    """

    first: int
    last: int
    low: int
    high: int
    mask: torch.Tensor


@dataclass(slots=True, eq=False)
class Pass:
    """One pass: its rows, the layers' windows, who looks on, and how chunks overlap.

    ``last_row_ends``: the last layer attends for the last row alone.
    """

    rows: Rows
    windows: tuple[int | None, ...]
    observer: Observer | None = None
    overlap: Overlap | None = None
    last_row_ends: bool = False


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Rows,
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
        The query rows' positions.
    window
        Keys that a row sees, itself included; None is no limit.

    Returns
    -------
    torch.Tensor
        ``[batch, heads, rows, head_dim]``. Rows go in blocks; each block reads only the
        keys that one of its rows may see. On a GPU a kernel does so where it can.
    """
    if window is None and len(rows) == key.shape[2]:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    if query.is_cuda and len(query) == 1:
        import ragkv_kernels

        tensors = query[0], key[0], value[0]
        if ragkv_kernels.runs_attend(*tensors):
            attended: torch.Tensor = ragkv_kernels.attend(
                *tensors, rows.positions, window=window, scaling=scaling
            ).out
            return attended[None]
    out = torch.empty_like(query)
    for block in rows.blocks(window, query.dtype):
        out[:, :, block.first : block.last] = functional.scaled_dot_product_attention(
            query[:, :, block.first : block.last],
            key[:, :, block.low : block.high],
            value[:, :, block.low : block.high],
            attn_mask=block.mask,
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
        raise RuntimeError("the 'ragkv' attention runs inside ragkv's own passes only")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    window = ragkv_pass.windows[layer]
    if ragkv_pass.observer is not None:
        ragkv_pass.observer(
            LayerCall(layer, query, key, value, ragkv_pass.rows.positions, window, scaling)
        )
    rows, overlap = ragkv_pass.rows, ragkv_pass.overlap
    unused = 0
    if ragkv_pass.last_row_ends and layer == len(ragkv_pass.windows) - 1:
        unused = len(rows) - 1
        query, rows = query[:, :, unused:], Rows(rows.positions[unused:])
    if overlap is None:
        out = attend(query, key, value, rows, window, scaling)
    else:
        out = attend_overlapping(
            query, key, value, rows.positions, overlap=overlap, window=window, scaling=scaling
        )
    return functional.pad(out, (0, 0, unused, 0)).transpose(1, 2).contiguous(), None


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


@contextmanager
def last_row_ends(model: PreTrainedModel) -> Iterator[None]:
    """Let the last layer's feed-forward run for the last row alone, whose logits are wanted.

    Together with ``Pass(last_row_ends=True)``: that layer then computes keys and values for
    all rows, and everything else for one.
    """
    feed_forward = getattr(backbone_of(model).layers[-1], "mlp", None)
    if feed_forward is None:
        yield
        return
    hook = feed_forward.register_forward_pre_hook(_last_row)
    try:
        yield
    finally:
        hook.remove()


def _last_row(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Cut ``[1, rows, hidden]`` to its last row; what is added to the others is never read."""
    return given[0][:, -1:], *given[1:]
