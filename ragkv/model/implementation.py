"""The choice of implementation, made only here: a GPU kernel, oneDNN, or torch.

A pass has few rows, for which torch's choice, MKL, spends much of its time packing the weights.
oneDNN, also part of torch, reads the weights in place. On AMD's processors it is up to 1.4 times as
fast for fewer than 64 rows and, with AVX-512, 1.1 times for hundreds; with weights packed once, up
to 1.7 times as fast again for 4 to 32 rows. On Intel's it is 1.1 to 4.2 times as fast for 4 to 32
rows, and slower for fewer and for hundreds. With AMX, attention in bfloat16 is 2.2 times as fast as
in float32.
docs/log.md has the measurements. Other processors have not been measured, and keep torch's choice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch

Implementation = Literal["kernel", "onednn", "torch", "rounded"]
Operation = Literal["linear", "quantised", "product", "attention"]

_FEWEST_ROWS = 16
"""Fewer rows of an attention's group are faster by torch, with all groups in one product."""
_THIN = {"AMD": range(1, 64), "Intel": range(4, 64)}
"""Numbers of rows for which oneDNN is faster than MKL, by maker; AMD's with AVX-512: any number."""
_PACKED_FOR = 16
"""Rows that weights are packed for; 1 to 800 rows are as fast as with their own packing."""


class _Rounding(threading.local):
    """Whether a thread's attention may round float32 rows, keys and values to bfloat16."""

    is_allowed = False


_rounding = _Rounding()
_backends: Any = torch.backends
_override: Implementation | None = None


def implementation_for(operation: Operation, *tensors: torch.Tensor) -> Implementation:
    """Return the implementation of an operation for these tensors in this thread.

    Parameters
    ----------
    operation
        ``"linear"``: rows times a contiguous weight; ``"quantised"``: the same for a weight with
        copies of fewer bits; ``"product"``: rows times a matrix of any strides; ``"attention"``:
        both products of an attention and its softmax.
    tensors
        For attention: query, key and value ``[heads, rows or tokens, head_dim]``; else the rows.
    """
    first = tensors[0]
    if first.is_cuda:
        return "kernel" if operation == "attention" and _runs_kernel(*tensors) else "torch"
    if _override is not None and _override != "onednn":
        return _override
    if operation == "quantised":
        return "rounded" if _is_plain(first) else "torch"
    if operation == "attention" and _rounds_attention(first):
        return "rounded"
    return "onednn" if _runs_onednn(operation, first) else "torch"


@contextmanager
def override_implementation(implementation: Implementation) -> Iterator[None]:
    """Force an implementation on the CPU in the block, for all threads: for tests.

    torch still computes tensors that oneDNN cannot take.
    """
    global _override  # noqa: PLW0603
    before, _override = _override, implementation
    try:
        yield
    finally:
        _override = before


@contextmanager
def allow_rounded_attention() -> Iterator[None]:
    """Allow this thread's attention to multiply in bfloat16 in the block where that is faster."""
    before, _rounding.is_allowed = _rounding.is_allowed, True
    try:
        yield
    finally:
        _rounding.is_allowed = before


def onednn_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    then: Literal["none", "swish"] = "none",
) -> torch.Tensor:
    """Return ``rows @ weight^T + bias`` by oneDNN, in new memory: ``[…, n, in]``, ``[out, in]``.

    The weight can be packed, see :func:`packed_weight`. ``then`` is applied to the sums, before
    they are rounded.
    """
    out: torch.Tensor = _onednn()(rows, weight, bias, then, [], "")
    return out


def onednn_linear_times(
    rows: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """Return ``(rows @ weight^T) * factor`` as :func:`onednn_linear` does, rounded once."""
    out: torch.Tensor = _onednn().binary(rows, factor, weight, None, "mul")
    return out


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a weight ``[out, in]`` packed for :func:`onednn_linear`.

    The weight itself if this torch has no such operator.
    """
    pack: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    packed: torch.Tensor = weight if pack is None else pack(weight.detach(), _PACKED_FOR)
    return packed


def products(rows: torch.Tensor, others: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``rows @ others^T``, by oneDNN group by group, by torch for all groups at once.

    Parameters
    ----------
    rows
        ``[groups, n, inner]``.
    others
        ``[groups, m, inner]``, of any strides.

    Yields
    ------
    torch.Tensor
        ``[some groups, n, m]``, new memory.
    """
    if implementation_for("product", rows) == "onednn":
        for some, other in zip(rows, others, strict=True):
            yield onednn_linear(some, other)[None]
    else:
        yield torch.matmul(rows, others.transpose(1, 2))


def _runs_kernel(*tensors: torch.Tensor) -> bool:
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        return False
    import ragkv_kernels

    return bool(ragkv_kernels.runs_attend(*tensors))


def _rounds_attention(rows: torch.Tensor) -> bool:
    is_faster = rows.shape[-2] >= _FEWEST_ROWS and has_bfloat16_tiles()
    return is_faster and _rounding.is_allowed and _is_plain(rows)


def _runs_onednn(operation: Operation, rows: torch.Tensor) -> bool:
    product = _onednn()
    if product is None or not _is_plain(rows):
        return False
    if operation != "linear" and not _reads_any_strides(product):
        return False
    if _override == "onednn":
        return True
    is_amd = _runs_mkl_on("AMD")
    if operation == "product":
        return is_amd and rows.shape[-2] >= _FEWEST_ROWS
    is_wide = is_amd and has_avx512()
    if is_wide or operation == "attention":
        return is_wide
    count = rows.numel() // rows.shape[-1]
    return any(count in thin and _runs_mkl_on(maker) for maker, thin in _THIN.items())


def _is_plain(rows: torch.Tensor) -> bool:
    """Whether rows are float32 on the CPU, without gradients or autocast."""
    plain = rows.device.type == "cpu" and rows.dtype == torch.float32
    return plain and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


def has_quantised_products() -> bool:
    """Whether weights of fewer bits than float32 are faster on this CPU."""
    return has_int4_products() or has_bfloat16_products()


def has_bfloat16_products() -> bool:
    """Whether oneDNN multiplies bfloat16 numbers faster than float32 ones on this CPU."""
    return _onednn() is not None and _has_bfloat16_instructions()


def has_bfloat16_tiles() -> bool:
    """Whether the processor has instructions for whole bfloat16 matrices (AMX)."""
    return _onednn() is not None and bool(_capability("amx_bf16"))


def has_avx512() -> bool:
    """Whether torch multiplies with vectors of 512 bits."""
    return str(_backends.cpu.get_cpu_capability()) == "AVX512"


@cache
def _has_bfloat16_instructions() -> bool:
    return bool(_capability("avx512_bf16") or _capability("amx_bf16"))


@cache
def has_int4_products() -> bool:
    """Whether torch multiplies by weights of 4 bits with this CPU's vectors."""
    return _backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and hasattr(
        torch.ops.aten, "_weight_int4pack_mm_for_cpu"
    )


@cache
def _runs_mkl_on(maker: str) -> bool:
    """Whether torch multiplies by MKL, on a processor of this maker."""
    return str(_capability("cpu_name")).startswith(maker) and _backends.mkl.is_available()


def _capability(name: str) -> object:
    """Return a property of the processor; None if torch does not know it."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)
    return capabilities().get(name)


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
    """Whether a product respects the strides of its second operand, unlike in some versions."""
    rows = torch.arange(15.0, device="cpu").view(3, 5)
    other = torch.arange(10.0, device="cpu").view(5, 2).t()
    return torch.equal(product(rows, other, None, "none", [], ""), rows.mm(other.t()))
