"""A model's linear layers during ragkv's passes, by the fastest product."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from ragkv.model.architecture import backbone_of
from ragkv.model.fingerprint import state_of
from ragkv.model.implementation import (
    has_quantised_products,
    implementation_for,
    onednn_linear,
    packed_weight,
)
from ragkv.model.memory import total_bytes
from ragkv.model.quantised import QuantisedWeight, is_quantised
from ragkv.model.step_layer import Forward, step_forward, suits_steps

_PACKED_SHARE, _QUANTISED_SHARE = 16, 2.8
"""The machine's memory over the weights of which copies are kept, at least: all or none. Copies of
quantised weights take 0.7 of these: up to a quarter of the memory."""

_SLOW_ROWS = range(2, 4)
"""Rows that take longer than the next larger number does, with packed weights."""


class _Fast:
    """Of a model: layers, linear and suited, with another ``forward``; its threads; the weights.

    ``packed`` are those of ``state``; None where they would take too much memory. ``quantised``
    have products of fewer bits; none has unless ``rounds``.
    """

    def __init__(self, *, rounds: bool = True) -> None:
        self.rounds = rounds
        self.threads: set[int] = set()
        self.blocks = 0
        self.layers: list[nn.Linear] = []
        self.suited: list[nn.Module] = []
        self.step: Forward = step_forward
        self.state: object = None
        self.packed: dict[nn.Linear, torch.Tensor] | None = None
        self.quantised: dict[nn.Linear, QuantisedWeight] = {}

    def replace(self, model: PreTrainedModel) -> None:
        """Replace the layers' ``forward``, unless it is; drop what was packed of other weights."""
        if model.device.type != "cpu" or model.dtype != torch.float32:
            return
        if not self.blocks:
            linear = [layer for layer in model.modules() if type(layer) is nn.Linear]
            self.layers = [layer for layer in linear if _suits(layer)]
            self.suited = [x for x in backbone_of(model).layers if suits_steps(x, self.layers)]
        state = state_of(model), self.rounds
        if state != self.state:
            self._weigh(total_bytes(model.device))
            self.state = state
        for layer in self.layers:
            layer.__dict__["forward"] = partial(self._forward, layer)
        for each in self.suited:
            each.__dict__["forward"] = self.step(each)

    def _weigh(self, memory: int) -> None:
        """Decide which copies of the weights are kept; each is made at its first product."""
        self.step = cache(partial(step_forward, weakref.proxy(self)))
        known = self.layers if self.rounds and has_quantised_products() else []
        quantised = [layer for layer in known if is_quantised(layer.weight)]
        fits = sum(each.weight.nbytes for each in quantised) * _QUANTISED_SHARE <= memory
        self.quantised = {layer: QuantisedWeight(layer.weight) for layer in quantised if fits}
        others = [layer for layer in self.layers if layer not in self.quantised]
        nbytes = sum(each.weight.nbytes for each in others)
        self.packed = {} if nbytes * _PACKED_SHARE <= memory else None

    def restore(self) -> None:
        """Give the layers their own ``forward`` back."""
        for layer in (*self.layers, *self.suited):
            del layer.__dict__["forward"]
        self.layers, self.suited = [], []

    def _forward(self, layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() in self.threads and rows.numel():
            quantised = self.quantised.get(layer)
            if quantised is not None and implementation_for("quantised", rows) == "rounded":
                product = quantised.product(rows, layer.bias)
                if product is not None:
                    return product
            if implementation_for("linear", rows) == "onednn":
                return self._product(layer, rows)
        return nn.Linear.forward(layer, rows)

    def together(self, layers: Sequence[nn.Linear]) -> Forward:
        """Return the product of few rows with layers of one input, side by side."""
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        if all(layer in self.quantised for layer in layers) and len(biases) in (0, len(layers)):
            weight = QuantisedWeight(torch.cat([layer.weight.detach() for layer in layers]))
            if weight.int4 is not None:
                del weight.weight
                return partial(weight.few, bias=torch.cat(biases) if biases else None)
        return lambda rows: torch.cat([layer.forward(rows) for layer in layers], dim=-1)

    def _product(self, layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        if self.packed is None or layer in self.quantised:
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
def fast_linear_layers(model: PreTrainedModel, *, ordinary: bool = False) -> Iterator[None]:
    """Let the model's float32 linear layers use the fastest product in the block.

    Everything else stays with torch: other dtypes and devices, layers of another class or with a
    replaced ``forward``, gradients, and the calls of threads without such a block. The model's lock
    must be held where a block begins and ends. A block inside another one changes nothing.

    Parameters
    ----------
    ordinary
        For an ordinary call of the model: by torch unless weights are quantised, as in passes.
    """
    fast, thread = _fast_of(model), threading.get_ident()
    if thread in fast.threads:
        yield
        return
    fast.replace(model)
    fast.blocks += 1
    if not ordinary or fast.quantised:
        fast.threads.add(thread)
    try:
        yield
    finally:
        fast.threads.discard(thread)
        fast.blocks -= 1
        if not fast.blocks:
            fast.restore()


def keep_float32(model: PreTrainedModel) -> None:
    """Let no product with the model's weights be rounded to fewer bits, from now on."""
    _fast_of(model).rounds = False


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Let no product be rounded in the block; the model's lock must be held."""
    fast = _fast_of(model)
    before, fast.rounds = fast.rounds, False
    try:
        yield
    finally:
        fast.rounds = before


def arithmetic_of(model: PreTrainedModel) -> str:
    """Return the model's dtype, and whether its last pass had products of fewer bits."""
    return str(model.dtype).removeprefix("torch.") + ", quantised products" * rounds_products(model)


def rounds_products(model: PreTrainedModel) -> bool:
    """Whether the model's last pass had products of fewer bits."""
    return bool(_fast_of(model).quantised)


def release_packed(model: PreTrainedModel) -> None:
    """Free what :func:`fast_linear_layers` keeps for the model; its lock must be held."""
    _fast[model] = _Fast(rounds=_fast_of(model).rounds)


def _fast_of(model: PreTrainedModel) -> _Fast:
    return _fast.setdefault(model, _Fast())


def _suits(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        "forward" not in layer.__dict__
        and type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )
