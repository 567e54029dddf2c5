"""Matrix products of a pass on a CPU, by oneDNN where torch would take MKL.

A pass has few rows, and on AMD's processors MKL then spends much of its time arranging the
weights. oneDNN, which is in torch too, reads the weights as they lie: it computes hundreds of rows
1.1 times as fast, and fewer up to 1.4 times; a pass's attention gains a little, too.
docs/log.md has the measurements. On other processors nobody has measured it, and torch's choice
stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_backends: Any = torch.backends


def _onednn_product() -> Any:
    """Return oneDNN's ``(rows, weight, bias, "none", [], "")``; None leaves it to torch."""
    capabilities: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    on_amd = str(capabilities().get("cpu_name", "")).startswith("AMD")
    if not (on_amd and _backends.mkl.is_available() and _backends.mkldnn.is_available()):
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


_product: Any = _onednn_product()


@contextmanager
def by_onednn(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, in this thread, let the model's float32 linear layers use oneDNN.

    All else is what it was: other types and devices, layers that are not torch's own or whose
    ``forward`` was replaced, one row alone, what needs a gradient, other makers' processors, and
    torch without MKL or oneDNN. The model's lock must be held.
    """
    changed: list[nn.Linear] = []
    if _product is not None and _backends.mkldnn.enabled and model.device.type == "cpu":
        changed = [layer for layer in model.modules() if type(layer) is nn.Linear and _suits(layer)]
    here = threading.get_ident()
    for layer in changed:
        layer.__dict__["forward"] = partial(_forward, layer, here)
    try:
        yield
    finally:
        for layer in changed:
            del layer.__dict__["forward"]


def products(rows: torch.Tensor, others: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``rows @ others^T``, group by group by oneDNN, or of all groups at once.

    Parameters
    ----------
    rows
        ``[groups, n, inner]``.
    others
        ``[groups, m, inner]``, its strides in any order.

    Yields
    ------
    torch.Tensor
        ``[some groups, n, m]``, new memory.
    """
    if _suits_onednn(rows) and _reads_any_strides(_product):
        for some, other in zip(rows, others, strict=True):
            yield _product(some, other, None, "none", [], "")[None]
    else:
        yield torch.matmul(rows, others.transpose(1, 2))


def suits_attention(rows: torch.Tensor) -> bool:
    """Whether attention by :func:`products` is quicker than torch's: with AVX-512 alone."""
    wide = _backends.cpu.get_cpu_capability() == "AVX512"
    return wide and _suits_onednn(rows) and _reads_any_strides(_product)


def _suits_onednn(rows: torch.Tensor) -> bool:
    """Whether oneDNN is to be had for rows like these, where torch would take MKL."""
    return (
        _product is not None
        and _backends.mkldnn.enabled
        and rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


@cache
def _reads_any_strides(product: Any) -> bool:
    """Whether a product heeds the strides of its second operand: in another torch it may not."""
    rows = torch.arange(15.0, device="cpu").view(3, 5)
    other = torch.arange(10.0, device="cpu").view(5, 2).t()
    return torch.equal(product(rows, other, None, "none", [], ""), rows.mm(other.t()))


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
    if rows.numel() <= rows.shape[-1] or threading.get_ident() != thread or not _suits_onednn(rows):
        return nn.Linear.forward(layer, rows)
    out: torch.Tensor = _product(rows, layer.weight, layer.bias, "none", [], "")
    return out
