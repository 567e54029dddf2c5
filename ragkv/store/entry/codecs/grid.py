"""Uniform grids over groups of numbers: what int8 and int4 share.

KIVI's axes (arXiv 2402.02750, section 3.2): keys differ most between channels, so each
channel has its own grid over a group of tokens; values differ most between tokens, so each
token has its own. Keys come unrotated, which leaves their channels apart.

A key's grid goes from the group's smallest to its largest, two float16 a group. A value's
lies about 0, and its step is one byte times a float32 that the whole layer shares, as in
QLoRA's double quantisation (arXiv 2305.14314, section 3). Arithmetic is float32, one
rounding an operation, so that codes are the same on every device.
"""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from ragkv.errors import StoreError
from ragkv.store.entry.codecs.base import Codec

if TYPE_CHECKING:
    import ragkv_kernels

LARGEST = 32768.0
"""Largest number that is kept: what is decoded still fits float16, rounded up."""


class GridCodec(Codec):
    """A layer as codes on grids.

    The bytes, without gaps, little-endian:

    ==============================  =======  ===================================
    ``key_low``, ``key_step``       float16  ``[kv_heads, groups, head_dim]`` each
    ``value_unit``                  float32  ``[1]``
    ``value_step``                  uint8    ``[groups, tokens]``
    keys' codes, values' codes      packed   ``[kv_heads, tokens, head_dim]`` each
    ==============================  =======  ===================================

    A key is ``key_low + code * key_step``, a value
    ``(code - (levels - 1) / 2) * value_step * value_unit``. A key's groups are of tokens, a
    value's of heads; they are of equal length, but for the last.
    """

    levels: ClassVar[int]
    """Codes are 0 to ``levels - 1``."""

    key_group: ClassVar[int]
    """Tokens of a key's group: at least so many where the chunk has them, less than twice."""

    value_group: ClassVar[int]
    """Numbers of one token that share a step: whole heads, so many as reach this."""

    @abstractmethod
    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the bytes, ``[n]`` uint8, of codes, ``[m]`` uint8."""

    @abstractmethod
    def unpack(self, data: torch.Tensor, count: int) -> torch.Tensor:
        """Return ``[count]`` codes, uint8."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[bytes]:
        """Return the layer's grids and codes, made on the device where the layer is."""
        if keys.device.type != "cpu":
            return [self._encode_there(keys, values)]
        key_codes, low, key_step = self._put_keys(self._checked(keys))
        value_codes, unit, value_step = self._put_values(self._checked(values))
        codes = self.pack(key_codes.view(-1)), self.pack(value_codes.view(-1))
        parts = [low, key_step, unit, value_step, *codes]
        flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
        return [torch.cat(flat).numpy().tobytes()]

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Compute the numbers that the codes stand for."""
        _, heads, tokens, width = out.shape
        received = torch.frombuffer(data, dtype=torch.uint8)
        low, key_step, unit, value_step, *packed = torch.split(received, self._sizes(out.shape))
        keys, values = (self.unpack(part, out[0].numel()).view(out[0].shape) for part in packed)
        grids = [_halves(part).view(heads, -1, 1, width) for part in (low, key_step)]
        for piece in _pieces(tokens, self.key_group):
            lows, steps = (grid[:, piece.groups] for grid in grids)
            torch.add(piece.cut(keys) * steps, lows, out=piece.cut(out[0]))
        spread = _spread(value_step.view(-1, tokens), heads, self._together(width))
        steps = (spread.float() * unit.clone().view(torch.float32))[..., None]
        centre = torch.full((1,), (self.levels - 1) / 2, dtype=torch.float32, device=out.device)
        torch.mul(values - centre, steps, out=out[1])

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:  # noqa: ARG002
        """Return the size of the grids and codes."""
        return sum(self._sizes(shape))

    def for_kernels(self) -> ragkv_kernels.Grid:
        """Return the grid as ragkv_kernels wants it."""
        import ragkv_kernels

        return ragkv_kernels.Grid(self.levels, self.key_group, self.value_group)

    def _sizes(self, shape: Sequence[int]) -> list[int]:
        """Return the bytes of the six parts."""
        _, heads, tokens, width = shape
        key_grids = 2 * heads * _pieces(tokens, self.key_group)[-1].groups.stop * width
        value_grids = tokens * _pieces(heads, self._together(width))[-1].groups.stop
        codes = math.ceil(heads * tokens * width * math.log2(self.levels) / 8)
        return [key_grids, key_grids, 4, value_grids, codes, codes]

    def _together(self, width: int) -> int:
        """Return how many heads, at least, share a value's step."""
        return math.ceil(self.value_group / width)

    def _put_keys(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes, ``low`` and ``step`` of float32 keys."""
        codes = torch.empty(keys.shape, dtype=torch.uint8, device=keys.device)
        lows, steps = [], []
        for piece in _pieces(keys.shape[1], self.key_group):
            part = piece.cut(keys)
            smallest, largest = part.amin(2, keepdim=True), part.amax(2, keepdim=True)
            # a little lower: rounding to float16 must not lift the grid off the smallest
            low = (smallest - smallest.abs() * 2.0**-11).half()
            step = ((largest - low.float()) / (self.levels - 1)).half()
            self._write((part - low.float()) / _divisor(step.float()), piece.cut(codes))
            lows.append(low)
            steps.append(step)
        return codes, torch.cat(lows, dim=1), torch.cat(steps, dim=1)

    def _put_values(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes, ``unit`` and ``step`` of float32 values."""
        heads, _, width = values.shape
        half = (self.levels - 1) / 2
        largest = values.abs().amax(2)
        pieces = _pieces(heads, self._together(width))
        wanted = torch.cat([piece.cut(largest[None])[0].amax(1) for piece in pieces]) / half
        unit = (wanted.amax() / 255).view(1)
        step = (wanted / _divisor(unit)).ceil().clamp_max(255)
        spread = _spread(step, heads, self._together(width))[..., None]
        codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
        self._write(values / _divisor(spread * unit) + half, codes)
        return codes, unit, step.to(torch.uint8)

    def _write(self, places: torch.Tensor, codes: torch.Tensor) -> None:
        codes.copy_(places.round_().clamp_(0, self.levels - 1))

    def _checked(self, numbers: torch.Tensor) -> torch.Tensor:
        numbers = numbers.detach().float()
        self._require_kept(float(numbers.abs().amax()))
        return numbers

    def _require_kept(self, largest: float) -> None:
        if not largest <= LARGEST:  # also where something is not a number
            raise StoreError(
                f"codec {self.name} keeps keys and values up to {LARGEST:.0f}, and here is "
                f"{largest:g}: use codec raw for this model"
            )

    def _encode_there(self, keys: torch.Tensor, values: torch.Tensor) -> bytes:
        """Encode by a kernel; the bytes cross to the host together with the largest number."""
        import ragkv_kernels

        made = ragkv_kernels.encode(keys.detach(), values.detach(), None, grid=self.for_kernels())
        largest = made.largest.view(1).view(torch.uint8)
        data = torch.cat([made.data, largest]).cpu().numpy().tobytes()
        self._require_kept(struct.unpack("<f", data[-4:])[0])
        return data[:-4]


class _Piece(NamedTuple):
    """A stretch of an axis that is cut into groups of equal length."""

    span: slice
    groups: slice

    def cut(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a view ``[a, groups, length, ...]`` of the stretch in ``[a, n, ...]``."""
        count = self.groups.stop - self.groups.start
        return numbers[:, self.span].view(len(numbers), count, -1, *numbers.shape[2:])


def _pieces(size: int, least: int) -> list[_Piece]:
    """Cut an axis into groups of ``least`` or more; a shorter last one is a piece of its own."""
    length = math.ceil(size / max(1, size // least))
    full = size // length
    pieces = [_Piece(slice(0, full * length), slice(0, full))]
    if full * length < size:
        pieces.append(_Piece(slice(full * length, size), slice(full, full + 1)))
    return pieces


def _spread(steps: torch.Tensor, heads: int, least: int) -> torch.Tensor:
    """Return each head's steps, ``[heads, tokens]``, of its group's, ``[groups, tokens]``."""
    length = math.ceil(heads / max(1, heads // least))
    return steps.repeat_interleave(length, 0)[:heads]


def _divisor(step: torch.Tensor) -> torch.Tensor:
    """Return steps to divide by: where all numbers are equal, the step is 0."""
    return step.where(step > 0, 1.0)


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Return the float16 that lie in bytes, as float32."""
    return data.clone().view(torch.float16).float()
