"""Which implementation computes: a GPU kernel, oneDNN, or torch. The one place that decides.

A pass has few rows, and on AMD's processors torch's choice, MKL, then spends much of its time
arranging the weights. oneDNN, which is in torch too, reads the weights as they lie: 1.1 times as
fast for hundreds of rows, up to 1.4 times for fewer; and up to 1.7 times as fast again for 4 to 32
rows where the weights are arranged once, in memory of their own. docs/log.md has the measurements.
Other processors have not been measured, and keep torch's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch

Implementation = Literal["kernel", "onednn", "torch", "rounded"]
Operation = Literal["linear", "quantised", "product", "attention"]

_FEWEST_ROWS = 16
"""Fewer rows of an attention's group times its keys are faster by torch, all groups at once."""
_PACKED_FOR = 16
"""Rows that weights are arranged for: 1 to 800 are as fast as with an arrangement of their own."""

_backends: Any = torch.backends
_override: Implementation | None = None


def implementation_for(operation: Operation, *tensors: torch.Tensor) -> Implementation:
    """Return what computes an operation over such tensors, in this thread, now.

    Parameters
    ----------
    operation
        ``"linear"``: rows times a contiguous weight; ``"quantised"``: the same, with a weight that
        has copies of fewer bits; ``"product"``: rows times a matrix of any strides;
        ``"attention"``: both products of an attention and its softmax.
    tensors
        Of an attention: query, key and value ``[heads, rows or tokens, head_dim]``; else the rows.
    """
    first = tensors[0]
    if first.is_cuda:
        return "kernel" if operation == "attention" and _runs_kernel(*tensors) else "torch"
    if _override is not None and _override != "onednn":
        return _override
    if operation == "quantised":
        return "rounded" if _is_plain(first) else "torch"
    return "onednn" if _runs_onednn(operation, first) else "torch"


@contextmanager
def override_implementation(implementation: Implementation) -> Iterator[None]:
    """Let one implementation compute on the CPU in the block, whatever the processor: for tests.

    Tensors that oneDNN cannot take here stay with torch. The override holds for all threads.
    """
    global _override  # noqa: PLW0603
    before, _override = _override, implementation
    try:
        yield
    finally:
        _override = before


def onednn_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``rows @ weight^T + bias`` by oneDNN, new memory: ``[…, n, in]``, ``[out, in]``.

    The weight may be of :func:`packed_weight`.
    """
    out: torch.Tensor = _onednn()(rows, weight, bias, "none", [], "")
    return out


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight ``[out, in]`` as oneDNN arranges it, for :func:`onednn_linear`; new memory.

    The weight itself where this torch has no such operator.
    """
    pack: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    packed: torch.Tensor = weight if pack is None else pack(weight.detach(), _PACKED_FOR)
    return packed


def _runs_kernel(*tensors: torch.Tensor) -> bool:
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        return False
    import ragkv_kernels

    return bool(ragkv_kernels.runs_attend(*tensors))


def _runs_onednn(operation: Operation, rows: torch.Tensor) -> bool:
    product = _onednn()
    if product is None or not _is_plain(rows):
        return False
    if operation != "linear" and not _reads_any_strides(product):
        return False
    if _override == "onednn":
        return True
    if not is_faster_by_onednn():
        return False
    if operation == "attention":  # gains by AVX-512 alone
        return bool(_backends.cpu.get_cpu_capability() == "AVX512")
    return operation == "linear" or rows.shape[-2] >= _FEWEST_ROWS


def _is_plain(rows: torch.Tensor) -> bool:
    """Whether rows are float32 on the CPU, without gradients and autocast."""
    plain = rows.device.type == "cpu" and rows.dtype == torch.float32
    return plain and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


def has_quantised_products() -> bool:
    """Whether this CPU gains by weights of fewer bits than float32's."""
    return has_int4_products() or has_bfloat16_products()


def has_bfloat16_products() -> bool:
    """Whether oneDNN multiplies bfloat16 numbers here, faster than float32 ones."""
    return _onednn() is not None and _has_bfloat16_instructions()


@cache
def _has_bfloat16_instructions() -> bool:
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@cache
def has_int4_products() -> bool:
    """Whether torch multiplies by weights of 4 bits with this CPU's vectors."""
    return _backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and hasattr(
        torch.ops.aten, "_weight_int4pack_mm_for_cpu"
    )


@cache
def is_faster_by_onednn() -> bool:
    """Whether oneDNN is known to be faster than torch's choice: on AMD's processors, over MKL."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return str(capabilities.get("cpu_name", "")).startswith("AMD") and _backends.mkl.is_available()


def _onednn() -> Any:
    """Return oneDNN's ``(rows, weight, bias, "none", [], "")``; None where torch has none."""
    return _found_onednn() if torch._C._get_mkldnn_enabled() else None  # noqa: SLF001


@cache
def _found_onednn() -> Any:
    if not _backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


@cache
def _reads_any_strides(product: Any) -> bool:
    """Whether a product heeds the strides of its second operand: in another torch it may not."""
    rows = torch.arange(15.0, device="cpu").view(3, 5)
    other = torch.arange(10.0, device="cpu").view(5, 2).t()
    return torch.equal(product(rows, other, None, "none", [], ""), rows.mm(other.t()))
