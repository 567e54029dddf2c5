"""Rows that leave a pass between its layers: the layers above compute the other rows alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ragkv.attend.attention import Pass
from ragkv.attend.interface import is_innermost
from ragkv.attend.observe import LayerCall
from ragkv.attend.rows import Rows
from ragkv.model.architecture import backbone_of
from ragkv.model.calls import require_used
from ragkv.model.streams import to_device
from ragkv.splice.buffer import SplicedCache


class Leaving(Protocol):
    """Decides, layer by layer, which rows of a pass stay in it."""

    def __call__(self, call: LayerCall) -> npt.NDArray[np.int64] | None:
        """Return the positions that the layers above compute, or None for all.

        They are sorted, and the pass's last row is among them. After the first answer, a pass
        does not ask again.
        """
        ...


@contextmanager
def rows_leave(
    model: PreTrainedModel, one: Pass, cache: SplicedCache, leaving: Leaving
) -> Iterator[None]:
    """Let ``leaving`` end the rows of the pass in the block, which has no other observer.

    Above the layer where it answers, rows that left keep the keys and values that the cache has.
    """
    rows, device = one.rows, one.rows.positions.device
    left: tuple[Rows, torch.Tensor] | None = None  # the rows that stay, and where they stood
    begun = 0

    def ask(call: LayerCall) -> None:
        nonlocal left
        stay = leaving(call) if left is None else None
        if stay is not None:
            at = to_device(np.searchsorted(rows.places, stay), device)
            left = Rows.on(device, stay), at

    def before_layer(
        _: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        nonlocal begun
        if not is_innermost(one):
            return None
        begun += 1
        if left is None:
            return None
        staying, at = left
        if one.rows is rows:
            one.rows = staying
            one.masks.clear()
            for layer in cache.layers:
                layer.slots = staying.positions
        return _staying(args, len(rows), at), _staying(given, len(rows), at)

    one.observer = ask
    layers = backbone_of(model).layers
    hooks = [layer.register_forward_pre_hook(before_layer, with_kwargs=True) for layer in layers]
    try:
        yield
        require_used(begun, len(layers), "layers that called ragkv's hook")
    finally:
        for hook in hooks:
            hook.remove()


def _staying(part: Any, rows: int, at: torch.Tensor) -> Any:
    """Return a layer's arguments with the rows ``at`` of each tensor ``[1, rows, ...]``."""
    if isinstance(part, torch.Tensor):
        return part.index_select(1, at) if part.shape[:2] == (1, rows) else part
    if isinstance(part, tuple):
        return tuple(_staying(each, rows, at) for each in part)
    if isinstance(part, dict):
        return {name: _staying(each, rows, at) for name, each in part.items()}
    return part
