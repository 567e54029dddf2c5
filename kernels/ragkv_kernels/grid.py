"""The byte layout of one quantised layer, as the store's codecs define it.

The bytes, without gaps, little-endian:

==============================  =======  ===================================
``key_low``, ``key_step``       float16  ``[kv_heads, groups, head_dim]`` each
``value_unit``                  float32  ``[1]``
``value_step``                  uint8    ``[value_groups, tokens]``
keys' codes, values' codes      packed   ``[kv_heads, tokens, head_dim]`` each
==============================  =======  ===================================

A key is ``key_low + code * key_step``, a value ``(code - (levels - 1) / 2) * value_step *
value_unit``. A key's groups are of tokens, a value's of heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Grid:
    """How numbers are quantised: the parameters of a codec of the store.

    Attributes
    ----------
    levels
        256 (a byte a code) or 16 (two codes a byte: the first half of the layer's codes in
        the low bits, the second half in the high bits).
    key_group
        Fewest tokens of a key's group, unless the chunk has fewer.
    value_group
        Fewest numbers of one token that share a step; a group has whole heads.
    """

    levels: int
    key_group: int
    value_group: int

    def __post_init__(self) -> None:
        if self.levels not in {16, 256}:
            raise ValueError(f"levels must be 16 or 256, not {self.levels}")

    def key_span(self, tokens: int) -> int:
        """Return the tokens of a key's group; the last one can have fewer."""
        return _span(tokens, self.key_group)

    def key_spans(self, tokens: int) -> list[tuple[slice, int]]:
        """Return the tokens in whole groups with their number, and a shorter last group."""
        span = self.key_span(tokens)
        full = tokens // span
        found = [(slice(0, full * span), full), (slice(full * span, tokens), 1)]
        return [(part, groups) for part, groups in found if part.stop > part.start]

    def value_span(self, kv_heads: int, head_dim: int) -> int:
        """Return the heads that share a value's step; the last ones can be fewer."""
        return _span(kv_heads, math.ceil(self.value_group / head_dim))

    def sizes(self, shape: tuple[int, int, int]) -> list[int]:
        """Return the bytes of the six parts of a layer ``(kv_heads, tokens, head_dim)``."""
        heads, tokens, width = shape
        key_grids = 2 * heads * math.ceil(tokens / self.key_span(tokens)) * width
        value_grids = tokens * math.ceil(heads / self.value_span(heads, width))
        codes = heads * tokens * width
        if self.levels == 16:
            codes = (codes + 1) // 2
        return [key_grids, key_grids, 4, value_grids, codes, codes]


INT8 = Grid(levels=256, key_group=64, value_group=64)
INT4 = Grid(levels=16, key_group=256, value_group=128)


class Parts(NamedTuple):
    """The six parts of layers' bytes, each with its own dtype; axis 0 is the layer.

    Grids are shaped as above, the codes of a layer are flat.
    """

    key_low: torch.Tensor
    key_step: torch.Tensor
    value_unit: torch.Tensor
    value_step: torch.Tensor
    key_codes: torch.Tensor
    value_codes: torch.Tensor


class Encoded(NamedTuple):
    """One layer, quantised.

    Attributes
    ----------
    data
        ``[bytes]`` uint8: the codec's bytes.
    largest
        ``[]`` float32: the largest absolute key or value, inf where one is not a number.
        The store refuses layers above 32,768; no one else has looked.
    """

    data: torch.Tensor
    largest: torch.Tensor


def split(data: torch.Tensor, shape: tuple[int, int, int], grid: Grid) -> Parts:
    """Return views of layers' bytes, ``[layers, bytes]``; grids that lie askew are copied.

    Raises
    ------
    ValueError
        The bytes are not as many as such layers take.
    """
    sizes = grid.sizes(shape)
    if data.ndim != 2 or data.shape[1] != sum(sizes):
        raise ValueError(f"a layer {shape} takes {sum(sizes)} bytes, not {tuple(data.shape)}")
    low, step, unit, value_step, key_codes, value_codes = data.split(sizes, dim=1)
    heads, tokens, width = shape
    return Parts(
        _typed(low, torch.float16).unflatten(1, (heads, -1, width)),
        _typed(step, torch.float16).unflatten(1, (heads, -1, width)),
        _typed(unit, torch.float32),
        value_step.unflatten(1, (-1, tokens)),
        key_codes,
        value_codes,
    )


def divided(numbers: torch.Tensor, by: float) -> torch.Tensor:
    """Divide as IEEE 754 has it, everywhere: a GPU multiplies by a plain number's reciprocal."""
    return numbers / numbers.new_full((), by)


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as numbers, without a copy where they are aligned."""
    askew = data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize
    if askew or data.stride(0) % dtype.itemsize:
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype)


def pack(codes: torch.Tensor, levels: int) -> torch.Tensor:
    """Return the bytes, ``[n]`` uint8, of a layer's codes, uint8."""
    flat = codes.reshape(-1)
    if levels == 256:
        return flat
    half = (len(flat) + 1) // 2
    packed = flat[:half].clone()
    packed[: len(flat) - half] |= flat[half:] << 4
    return packed


def unpack(data: torch.Tensor, count: int, levels: int) -> torch.Tensor:
    """Return ``[count]`` codes, uint8: the inverse of :func:`pack`."""
    return data[:count] if levels == 256 else torch.cat([data & 15, data >> 4])[:count]


def spread(steps: torch.Tensor, heads: int, span: int) -> torch.Tensor:
    """Return each head's steps, ``[heads, tokens]``, of its group's, ``[groups, tokens]``."""
    return steps.repeat_interleave(span, 0)[:heads]


def _span(size: int, least: int) -> int:
    return math.ceil(size / max(1, size // least))
