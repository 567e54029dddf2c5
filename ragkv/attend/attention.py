"""The attention of ragkv's own passes, as transformers calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from ragkv.attend.observe import LayerCall, Observer
from ragkv.attend.overlap import attend_overlapping
from ragkv.attend.rows import Rows, attend
from ragkv.attend.scores import Scores
from ragkv.attend.sparse import SparseRows
from ragkv.attend.switch import described_by_own, ordinary, own_pass, switched
from ragkv.errors import UnsupportedModelError
from ragkv.model.architecture import backbone_of
from ragkv.splice.overlap import Overlap

_CHANGES_SCORES = ("sinks", "block_indices", "position_bias")
"""What attention may be given besides; a pass knows none of it."""


@dataclass(slots=True, eq=False)
class Pass:
    """One pass: its rows, the layers' windows, who looks on, and how chunks overlap.

    ``sparse``: what rows see in the upper layers, where these have no window.
    ``last_row_ends``: the last layer attends for the last row alone. ``masks``: those that
    observers keep from layer to layer.
    """

    rows: Rows
    windows: tuple[int | None, ...]
    observer: Observer | None = None
    overlap: Overlap | None = None
    sparse: SparseRows | None = None
    last_row_ends: bool = False
    masks: dict[object, torch.Tensor] = field(default_factory=dict)


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    before: str | None,
    ragkv_pass: Pass | None = None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Entry point that transformers calls under ragkv's name; a pass has no use for masks."""
    ragkv_pass = ragkv_pass or described_by_own(module)
    if ragkv_pass is None:
        return ordinary(before, module, query, key, value, attention_mask, **given)
    scaling: float = given["scaling"]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    unknown = [name for name in _CHANGES_SCORES if given.get(name) is not None]
    if attention_mask is not None or unknown:
        raise UnsupportedModelError(
            f"Layer {layer} attends with {', '.join(unknown) or 'a mask of its own'}, of which "
            "ragkv's passes know nothing: load the model with on_unsupported='full'."
        )
    window, how = ragkv_pass.windows[layer], Scores.given(**given)
    if given.get("sliding_window") != window:
        raise UnsupportedModelError(
            f"Layer {layer} attends within a window of {given.get('sliding_window')}, where this "
            f"model's configuration says {window}: mend its config.sliding_window."
        )
    if ragkv_pass.observer is not None:
        asking, masks = ragkv_pass.rows.positions, ragkv_pass.masks
        call = LayerCall(layer, query, key, value, asking, window, scaling, how, masks)
        ragkv_pass.observer(call)
        if call.is_computed:
            return call.attended().transpose(1, 2).contiguous(), None
    rows, overlap, sparse = ragkv_pass.rows, ragkv_pass.overlap, ragkv_pass.sparse
    unused = 0
    if ragkv_pass.last_row_ends and layer == len(ragkv_pass.windows) - 1:
        unused = len(rows) - 1
        query, sparse = query[:, :, unused:], None
        rows = Rows(rows.places[unused:], rows.positions[unused:])
    if overlap is not None:
        out = attend_overlapping(
            *(query, key, value, rows.positions),
            overlap=overlap,
            window=window,
            scaling=scaling,
            how=how,
        )
    elif sparse is not None and layer >= sparse.first_layer and window is None:
        out = sparse.attend(query, key, value, scaling, how=how)
    else:
        out = attend(query, key, value, rows, window, scaling, how=how)
    if unused:
        out = functional.pad(out, (0, 0, unused, 0))
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def subset_attention(model: PreTrainedModel, one: Pass | None = None) -> Iterator[None]:
    """Switch the model to ragkv's attention, and back when the block ends.

    The model's lock must be held. Other threads' calls stay what they are. Those of this thread
    are passes: each says which (``ragkv_pass=``), or all are ``one``.
    """
    config = backbone_of(model).config
    before = config._attn_implementation
    config._attn_implementation = switched(before, _attention_function)
    try:
        with own_pass(config, one):
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
    here = threading.get_ident()

    def last_row(
        _: torch.nn.Module, given: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        """Cut ``[1, rows, hidden]`` to its last row; what is added to the others is never read."""
        if threading.get_ident() != here:  # another's call
            return None
        return given[0][:, -1:], *given[1:]

    hook = feed_forward.register_forward_pre_hook(last_row)
    try:
        yield
    finally:
        hook.remove()
