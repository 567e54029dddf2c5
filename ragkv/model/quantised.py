"""Products of fewer bits than float32 for weights from a quantised file.

transformers loads a GGUF file's weights as float32, though neighbours are on a grid of few levels.
Steps of few rows are bound by reading the weights: 4-bit weights are packed again, to a sixth of
the bytes. Passes of many rows are bound by the products: bfloat16 ones take half the time on
processors that have them. On others, weights of 5 to 8 bits are packed for steps to a third of the
bytes: a level is the sum of two levels of 4 bits. Inputs, outputs, scales, and bfloat16 weights are
rounded to 8 bits; sums are float32. docs/log.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from ragkv.model.implementation import (
    has_avx512,
    has_bfloat16_products,
    has_int4_products,
    onednn_linear,
    onednn_linear_times,
    packed_weight,
)

_GROUP = 32
"""Neighbours along a weight's input that share a packed grid."""
_INT4_ROWS, _INT4_ROWS_FLOAT32 = 8, 16
"""Most rows for which 4-bit weights are as fast as bfloat16 ones, and as float32 ones."""
_HALVES_ROWS, _HALVES_ROWS_AVX512 = 4, 8
"""Most rows for which levels of 8 bits, as two of 4 bits, are as fast as float32 weights."""
_FEWEST_ROWS = 4
"""With bfloat16 weights, fewer rows take longer than this number."""
_OFF_GRID = 1e-3
"""Largest distance of a weight from its grid, in levels: that of rounding, not of an adapter."""
_PACKED_ROWS, _PACKED_TOGETHER = 16, 64
"""Divisor of the outputs that torch packs, and the number that it packs together."""
_LEAST_GROUP = 16
"""Neighbours that share a grid of more than 16 levels."""
_BLOCK = 1 << 20
"""Numbers of a weight that are packed at a time, to fit a processor's cache."""
_SAMPLED = 32
"""Number of groups of a weight that decide whether it is quantised."""
_EXACT_LOGITS = 16
"""Largest logits of a row that are recomputed in float32."""

_aten: Any = torch.ops.aten
_int4_product: Any = getattr(_aten, "_weight_int4pack_mm_for_cpu", None)


def int4_rows() -> int:
    """Return the most rows for which no product is faster than that of 4-bit weights."""
    return _INT4_ROWS if has_bfloat16_products() else _INT4_ROWS_FLOAT32


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """A weight ``[out, in]`` on a grid, in levels of 4 bits.

    Attributes
    ----------
    levels
        As torch packs ``[out, parts * in]``.
    scales
        bfloat16 ``[parts * in / 32, out, 2]``: step, and value of level 8.
    parts
        1; or 2, with the high and the low halves of levels of 8 bits beside one another.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    parts: int

    @property
    def most_rows(self) -> int:
        """Most rows for which no other product is faster."""
        if self.parts == 1:
            return int4_rows()
        return _HALVES_ROWS_AVX512 if has_avx512() else _HALVES_ROWS

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self.levels.nbytes + self.scales.nbytes

    def product(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``rows @ weight^T + bias``, ``[n, out]`` float32 from ``[n, in]``."""
        narrow = rows.bfloat16()
        if self.parts > 1:
            narrow = narrow.repeat(1, self.parts)
        out: torch.Tensor = _int4_product(narrow, self.levels, _GROUP, self.scales)
        return out.float() if bias is None else out + bias  # float32, like bias


class QuantisedWeight:
    """A weight ``[out, in]`` float32 with copies of fewer bits, made on first use."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.detach()

    def product(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``rows @ weight^T + bias``, ``[…, n, out]`` float32 from ``[…, n, in]``.

        None if float32 is faster on this processor.
        """
        found = joint_product([self], rows.reshape(-1, rows.shape[-1]), bias)
        return None if found is None else found.view(*rows.shape[:-1], -1)

    def logits(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return :meth:`product` with each row's largest numbers recomputed in float32.

        Logits in bfloat16 are up to 0.25 apart, more than many leads of a likeliest token.
        """
        out = self.product(rows, bias)
        if out is None:
            return None
        largest = out.topk(min(_EXACT_LOGITS, out.shape[-1])).indices
        exact = (self.weight[largest] @ rows[..., None])[..., 0]
        return out.scatter_(-1, largest, exact if bias is None else exact + bias[largest])

    @cached_property
    def bfloat16(self) -> torch.Tensor:
        """The weight in bfloat16, as oneDNN arranges it."""
        return packed_weight(self.weight.bfloat16())

    @cached_property
    def int4(self) -> Int4Weight | None:
        """The weight in levels of 4 bits; None for other grids."""
        if not has_int4_products() or len(self.weight) % _PACKED_ROWS:
            return None
        int4 = _int4_weight(self.weight, 4)
        if int4 is not None or has_bfloat16_products():
            return int4
        return _int4_weight(self.weight, 8)  # with bfloat16, it pays after hundreds of steps


def joint_product(
    weights: Sequence[QuantisedWeight],
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    int4: Int4Weight | None = None,
) -> torch.Tensor | None:
    """Return products with weights of one input beside one another, ``[n, sum of outs]`` float32.

    ``rows`` are ``[n, in]`` float32, ``int4`` is all weights' :func:`joint_int4`; by default one
    weight's own. None if float32 is faster on this processor.
    """
    if len(rows) <= int4_rows():
        int4 = int4 or (weights[0].int4 if len(weights) == 1 else None)
        if int4 is not None and len(rows) <= int4.most_rows:
            return int4.product(rows, bias)
    if not has_bfloat16_products():
        return None
    narrow = functional.pad(rows.bfloat16(), (0, 0, 0, max(0, _FEWEST_ROWS - len(rows))))
    found = [onednn_linear(narrow, each.bfloat16)[: len(rows)] for each in weights]
    if len(found) == 1:
        return found[0].float() if bias is None else found[0] + bias
    widths = [part.shape[1] for part in found]
    out = rows.new_empty(len(rows), sum(widths))
    for into, part in zip(torch.split(out, widths, dim=1), found, strict=True):
        into.copy_(part)
    return out if bias is None else out.add_(bias)


def gated_product(
    rows: torch.Tensor, gate: QuantisedWeight, up: QuantisedWeight, down: QuantisedWeight
) -> torch.Tensor:
    """Return ``(silu(rows @ gate^T) * (rows @ up^T)) @ down^T``, ``[n, out]`` bfloat16.

    ``rows`` are ``[n, in]``. Sums are float32; each product is rounded once.
    """
    narrow = rows.bfloat16()
    gated = onednn_linear(narrow, gate.bfloat16, then="swish")
    return onednn_linear(onednn_linear_times(narrow, up.bfloat16, gated), down.bfloat16)


def joint_int4(weights: Sequence[QuantisedWeight]) -> Int4Weight | None:
    """Return weights of one input as one weight; None if one of them is on another grid."""
    if len(weights) == 1:
        return weights[0].int4
    own = [each.int4 for each in weights]
    found = [int4 for int4 in own if int4 is not None]
    if len(found) < len(own):
        return None
    whole = all(len(each.weight) % _PACKED_TOGETHER == 0 for each in weights[:-1])
    if not whole or len({int4.parts for int4 in found}) > 1:
        return QuantisedWeight(torch.cat([each.weight for each in weights])).int4
    levels = torch.cat([int4.levels for int4 in found])
    return Int4Weight(levels, torch.cat([int4.scales for int4 in found], dim=1), found[0].parts)


def _int4_weight(weight: torch.Tensor, bits: Literal[4, 8]) -> Int4Weight | None:
    """Return a weight on grids of so many bits, or None."""
    sample, grids = _sample(weight, _GROUP), _GRIDS[bits]
    fits = torch.stack([grid.levels(sample)[-1] for grid in grids])
    if not fits.any(0).all():
        return None
    grids = [grids[at] for at in fits.sum(1).argsort(descending=True, stable=True).tolist()]
    size = -(-_BLOCK // (weight.shape[1] * _PACKED_TOGETHER)) * _PACKED_TOGETHER
    packed, scales = [], []
    for some in torch.split(weight, size):
        found = _levels(some, grids)
        if found is None:
            return None
        levels, low, step = found
        middle = low + 8 * step
        if bits == 8:
            levels, middle, step = _halves(levels, low, step)
        packed.append(_aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1))  # noqa: SLF001
        scales.append(torch.stack([step, middle], dim=-1).transpose(0, 1).bfloat16())
    return Int4Weight(torch.cat(packed), torch.cat(scales, dim=1), bits // 4)


def _halves(
    levels: torch.Tensor, low: torch.Tensor, step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the high and the low 4 bits of levels beside one another, their level 8, and steps.

    Levels are moved so that level 128 is nearly 0: rounding the value of level 8 loses little.
    """
    groups = levels.view(*low.shape, _GROUP)
    zero = (low / step.clamp_min(torch.finfo().tiny)).round() + 128
    moved = zero.clamp(min=0).minimum(255 - groups.amax(2))
    levels = (groups + moved.to(torch.uint8)[..., None]).view_as(levels)
    middle = low + (128 - moved) * step
    halves = torch.cat([levels >> 4, levels & 15], dim=1)
    return halves, torch.cat([middle, 8 * step], dim=1), torch.cat([16 * step, step], dim=1)


def is_quantised(weight: torch.Tensor) -> bool:
    """Whether a sample of a weight ``[out, in]`` is on grids of at most 256 levels."""
    return weight.shape[1] % _GROUP == 0 and _on_grids(weight.detach(), _LEAST_GROUP, 256)


def _sample(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Return some groups of neighbours, ``[groups, group]``."""
    groups = weight.reshape(-1, group)
    return groups[:: -(-len(groups) // _SAMPLED)]


def _on_grids(weight: torch.Tensor, group: int, levels: int) -> bool:
    """Whether each group of neighbours in a sample is on a grid of at most ``levels`` levels."""
    sample = _sample(weight, group)
    low, high = sample.aminmax(dim=1, keepdim=True)
    steps = torch.arange(1, levels, device=weight.device)[:, None, None]
    exact = (sample - low) / (high - low).clamp_min(torch.finfo().tiny) * steps
    off = (exact - exact.round()).abs().amax(2)
    return bool((off.amin(0) < _OFF_GRID).all() and (high > low).any())


class _Grid(NamedTuple):
    """A grid for groups of neighbours, by the number of steps in a group's range.

    ``most`` is the number of steps from the least to the greatest; or, if ``signed``, from 0 to the
    number with the largest absolute value.
    """

    most: int
    signed: bool = False

    def levels(
        self, groups: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``levels, low, step, fits`` of groups ``levels * step + low``.

        ``groups`` and ``levels``, uint8, are ``[groups, 32]``, the others ``[groups]``.
        """
        low, high = groups.amin(1), groups.amax(1)  # torch's aminmax takes five times as long
        step = (torch.maximum(high, -low) if self.signed else high - low) / self.most
        exact = (groups - low[:, None]).div_(step.clamp_min(torch.finfo().tiny)[:, None])
        nearest = exact.round()
        off = exact.sub_(nearest).abs_().amax(1)
        return nearest.to(torch.uint8), low, step, off < _OFF_GRID


_GRIDS = {
    4: [_Grid(most) for most in range(15, 0, -1)],
    8: [_Grid(127, True), _Grid(16, True), *(_Grid(most) for most in range(31, 0, -1))],
}
"""Grids by the bits of their levels; type Q8_0's and Q5_0's are signed."""


def _levels(
    weight: torch.Tensor, grids: Sequence[_Grid]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return ``levels, low, step`` of a weight ``levels * step + low``.

    ``levels`` are uint8 ``[out, in]``, the others ``[out, in / 32]``. None unless every 32
    neighbours are on one of the grids.
    """
    groups = weight.reshape(-1, _GROUP)
    levels, low, step, fits = grids[0].levels(groups)
    for grid in grids[1:]:
        left = (~fits).nonzero()[:, 0]
        if not len(left):
            break
        levels[left], low[left], step[left], fits[left] = grid.levels(groups[left])
    if not fits.all():
        return None
    return levels.view_as(weight), low.view(len(weight), -1), step.view(len(weight), -1)
