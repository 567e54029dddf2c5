"""A model's linear layers during ragkv's passes, by the fastest product."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from ragkv.model.implementation import implementation_for, onednn_linear, transposed_linear

_changed: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


@contextmanager
def fast_linear_layers(model: PreTrainedModel) -> Iterator[None]:
    """Let the model's float32 linear layers use the fastest product in the block.

    Everything else stays with torch: other dtypes and devices, layers of another class or with a
    replaced ``forward``, gradients, and other threads' calls. The model's lock must be held. A
    block inside another one changes nothing.
    """
    if model in _changed:
        yield
        return
    changed: list[nn.Linear] = []
    if model.device.type == "cpu" and model.dtype == torch.float32:
        changed = [layer for layer in model.modules() if type(layer) is nn.Linear and _suits(layer)]
    thread = threading.get_ident()
    for layer in changed:
        layer.__dict__["forward"] = partial(_forward, layer, thread)
    _changed.add(model)
    try:
        yield
    finally:
        _changed.discard(model)
        for layer in changed:
            del layer.__dict__["forward"]


def _suits(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        "forward" not in layer.__dict__
        and type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )


def _forward(layer: nn.Linear, thread: int, rows: torch.Tensor) -> torch.Tensor:
    if threading.get_ident() == thread and rows.numel():
        implementation = implementation_for("linear", rows)
        if implementation == "onednn":
            return onednn_linear(rows, layer.weight, layer.bias)
        if implementation == "transposed":
            return transposed_linear(rows, layer.weight, layer.bias)
    return nn.Linear.forward(layer, rows)
