"""A model's linear layers during ragkv's passes, by the fastest product."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from ragkv.model.fingerprint import state_of
from ragkv.model.implementation import implementation_for, onednn_linear, packed_weight
from ragkv.model.memory import total_bytes

_PACKED_SHARE = 16
"""Packed weights take up to one part in so many of the machine's memory: all of a model or none."""

_SLOW_ROWS = range(2, 4)
"""Rows that take longer than the next larger number does, with packed weights."""


class _Fast:
    """Of a model: the layers whose ``forward`` is replaced, for which threads; packed weights.

    ``packed`` are those of ``state``; None where they would take too much memory.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.layers: list[nn.Linear] = []
        self.state: object = None
        self.packed: dict[nn.Linear, torch.Tensor] | None = None

    def replace(self, model: PreTrainedModel) -> None:
        """Replace the layers' ``forward``, unless it is; drop what was packed of other weights."""
        if model.device.type != "cpu" or model.dtype != torch.float32:
            return
        state = state_of(model)
        if not self.threads:
            linear = [layer for layer in model.modules() if type(layer) is nn.Linear]
            self.layers = [layer for layer in linear if _suits(layer)]
        for layer in self.layers:
            layer.__dict__["forward"] = partial(self._forward, layer)
        if state != self.state:
            nbytes = sum(layer.weight.nbytes for layer in self.layers)
            fits = nbytes * _PACKED_SHARE <= total_bytes(model.device)
            self.packed, self.state = {} if fits else None, state

    def restore(self) -> None:
        """Give the layers their own ``forward`` back."""
        for layer in self.layers:
            del layer.__dict__["forward"]
        self.layers = []

    def _forward(self, layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        mine = threading.get_ident() in self.threads and rows.numel()
        if mine and implementation_for("linear", rows) == "onednn":
            return self._product(layer, rows)
        return nn.Linear.forward(layer, rows)

    def _product(self, layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return onednn_linear(rows, layer.weight, layer.bias)
        if layer not in self.packed:
            self.packed[layer] = packed_weight(layer.weight)
        count = rows.numel() // rows.shape[-1]
        if count not in _SLOW_ROWS:
            return onednn_linear(rows, self.packed[layer], layer.bias)
        more = functional.pad(rows.reshape(count, -1), (0, 0, 0, _SLOW_ROWS.stop - count))
        out = onednn_linear(more, self.packed[layer], layer.bias)[:count]
        return out.view(*rows.shape[:-1], -1)


_fast: weakref.WeakKeyDictionary[PreTrainedModel, _Fast] = weakref.WeakKeyDictionary()


@contextmanager
def fast_linear_layers(model: PreTrainedModel) -> Iterator[None]:
    """Let the model's float32 linear layers use the fastest product in the block.

    Everything else stays with torch: other dtypes and devices, layers of another class or with a
    replaced ``forward``, gradients, and the calls of threads without such a block. The model's lock
    must be held where a block begins and ends. A block inside another one changes nothing.
    """
    fast, thread = _fast.setdefault(model, _Fast()), threading.get_ident()
    if thread in fast.threads:
        yield
        return
    fast.replace(model)
    fast.threads.add(thread)
    try:
        yield
    finally:
        fast.threads.remove(thread)
        if not fast.threads:
            fast.restore()


def release_packed(model: PreTrainedModel) -> None:
    """Free what :func:`fast_linear_layers` keeps for the model; its lock must be held."""
    _fast.pop(model, None)


def _suits(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        "forward" not in layer.__dict__
        and type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )
