"""A model's linear layers during ragkv's passes, by the fastest product."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from ragkv.model.architecture import backbone_of
from ragkv.model.fingerprint import state_of
from ragkv.model.implementation import (
    allow_rounded_attention,
    has_bfloat16_products,
    has_quantised_products,
    implementation_for,
    onednn_linear,
    packed_weight,
)
from ragkv.model.memory import total_bytes
from ragkv.model.pass_layer import Forward, pass_forward, suits_passes
from ragkv.model.quantised import QuantisedWeight, is_quantised, joint_int4, joint_product

_PACKED_SHARE, _QUANTISED_SHARE = 16, 2.8
"""Least multiple of the weights' bytes that the machine's memory must be to keep copies of them.
Copies of quantised weights take 0.7 of their bytes: up to a quarter of the memory."""

_SLOW_ROWS = range(2, 4)
"""Numbers of rows that take longer than four do, with packed weights."""


class _Patches:
    """A model's patched layers, the threads that use the patches, and the copies of weights.

    Attributes
    ----------
    rounds
        Whether products of fewer bits are allowed.
    threads
        Threads whose calls use the patches.
    blocks
        Running blocks of :func:`fast_linear_layers`.
    layers, suited, head
        Patched linear layers, patched decoder layers, and the layer of the logits.
    state
        State of the weights that were copied.
    packed
        Packed weights; None if they would take too much memory.
    quantised
        Weights with products of fewer bits.
    """

    def __init__(self, *, rounds: bool = True) -> None:
        self.rounds = rounds
        self.threads: set[int] = set()
        self.blocks = 0
        self.layers: list[nn.Linear] = []
        self.head: nn.Module | None = None
        self.suited: list[nn.Module] = []
        self.layer: Forward = pass_forward
        self.state: object = None
        self.packed: dict[nn.Linear, torch.Tensor] | None = None
        self.quantised: dict[nn.Linear, QuantisedWeight] = {}

    def replace(self, model: PreTrainedModel) -> None:
        """Patch the layers' ``forward``; drop copies of changed weights."""
        if model.device.type != "cpu" or model.dtype != torch.float32:
            return
        if not self.blocks:
            linear = [layer for layer in model.modules() if type(layer) is nn.Linear]
            self.layers = [layer for layer in linear if _suits(layer)]
            self.head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            decoder = backbone_of(model).layers
            self.suited = [layer for layer in decoder if suits_passes(layer, self.layers)]
        state = state_of(model), self.rounds
        if state != self.state:
            self._weigh(total_bytes(model.device))
            self.state = state
        for layer in self.layers:
            layer.__dict__["forward"] = partial(self._forward, layer)
        for each in self.suited:
            each.__dict__["forward"] = self.layer(each)

    def _weigh(self, memory: int) -> None:
        """Decide which weights are copied; each copy is made at its first product."""
        self.layer = cache(partial(pass_forward, weakref.proxy(self)))
        known = self.layers if self.rounds and has_quantised_products() else []
        quantised = [layer for layer in known if is_quantised(layer.weight)]
        fits = sum(each.weight.nbytes for each in quantised) * _QUANTISED_SHARE <= memory
        self.quantised = {layer: QuantisedWeight(layer.weight) for layer in quantised if fits}
        others = [layer for layer in self.layers if layer not in self.quantised]
        nbytes = sum(each.weight.nbytes for each in others)
        self.packed = {} if nbytes * _PACKED_SHARE <= memory else None

    def restore(self) -> None:
        """Restore the layers' own ``forward``."""
        for layer in (*self.layers, *self.suited):
            del layer.__dict__["forward"]
        self.layers, self.suited, self.head = [], [], None

    def _forward(self, layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() in self.threads and rows.numel():
            quantised = self.quantised.get(layer)
            if quantised is not None and implementation_for("quantised", rows) == "rounded":
                multiply = quantised.logits if layer is self.head else quantised.product
                product = multiply(rows, layer.bias)
                if product is not None:
                    return product
            if implementation_for("linear", rows) == "onednn":
                return self._product(layer, rows)
        return nn.Linear.forward(layer, rows)

    def together(self, layers: Sequence[nn.Linear]) -> Forward:
        """Return the function for a joint product of few rows with several layers of one input."""

        def each(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([layer.forward(rows) for layer in layers], dim=-1)

        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        if any(layer not in self.quantised for layer in layers) or 0 < len(biases) < len(layers):
            return each
        weights = [self.quantised[layer] for layer in layers]
        int4, bias = joint_int4(weights), torch.cat(biases) if biases else None

        def joint(rows: torch.Tensor) -> torch.Tensor:
            found = joint_product(weights, rows, bias, int4)
            return each(rows) if found is None else found

        return joint

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


_patches: weakref.WeakKeyDictionary[PreTrainedModel, _Patches] = weakref.WeakKeyDictionary()


@contextmanager
def fast_linear_layers(model: PreTrainedModel, *, ordinary: bool = False) -> Iterator[None]:
    """Use the fastest product for the model's float32 linear layers in the block.

    torch still computes other dtypes and devices, layers of another class or with a replaced
    ``forward``, gradients, and calls of threads without such a block. The model's lock must be held
    where a block begins and ends. A nested block changes nothing.

    Parameters
    ----------
    ordinary
        The block is an ordinary call: torch computes it unless weights are quantised.
    """
    patches, thread = _patches_of(model), threading.get_ident()
    if thread in patches.threads:
        yield
        return
    patches.replace(model)
    patches.blocks += 1
    if not ordinary or patches.quantised:
        patches.threads.add(thread)
    try:
        with allow_rounded_attention() if patches.quantised else nullcontext():
            yield
    finally:
        patches.threads.discard(thread)
        patches.blocks -= 1
        if not patches.blocks:
            patches.restore()


def keep_float32(model: PreTrainedModel) -> None:
    """Round no product with the model's weights to fewer bits from now on."""
    _patches_of(model).rounds = False


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Round no product in the block; the model's lock must be held."""
    patches = _patches_of(model)
    before, patches.rounds = patches.rounds, False
    try:
        yield
    finally:
        patches.rounds = before


def arithmetic_of(model: PreTrainedModel) -> str:
    """Return the model's dtype, and whether its last pass had products of fewer bits."""
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{dtype}, quantised products" if rounds_products(model) else dtype


def rounds_products(model: PreTrainedModel) -> bool:
    """Whether the model's last pass had products of fewer bits."""
    return bool(_patches_of(model).quantised)


def step_products(model: PreTrainedModel) -> Literal["float32", "bfloat16", "int4"]:
    """Return the kind of products that dominates steps over several rows."""
    if not rounds_products(model):
        return "float32"
    return "bfloat16" if has_bfloat16_products() else "int4"


def release_packed(model: PreTrainedModel) -> None:
    """Free the copies of the model's weights; its lock must be held."""
    _patches[model] = _Patches(rounds=_patches_of(model).rounds)


def _patches_of(model: PreTrainedModel) -> _Patches:
    return _patches.setdefault(model, _Patches())


def _suits(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        "forward" not in layer.__dict__
        and type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )
