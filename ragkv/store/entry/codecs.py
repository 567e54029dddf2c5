"""How one layer's keys and values become bytes: raw, or codes on grids of 8 or 4 bits."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence

import ragkv_kernels
import torch

from ragkv.errors import StoreError

Part = bytes | memoryview
"""Bytes to write, one part after the other."""

LARGEST = 32768.0
"""Largest number that a grid can store: decoded and rounded up, it still fits float16."""


class Codec(ABC):
    """Turns one layer's keys and values into bytes and back.

    A layer's shape is ``(2, kv_heads, tokens, head_dim)``, keys first; no size is 0.
    """

    name: str
    """The fingerprint's ``codec``."""

    lossless: bool = False
    """Whether decoding restores every bit."""

    @abstractmethod
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Part]:
        """Return a layer's bytes.

        Parameters
        ----------
        keys, values
            ``[kv_heads, tokens, head_dim]``, of one floating dtype, on any device.

        Raises
        ------
        StoreError
            The codec cannot store these numbers: they are not finite, or too large.
        """

    @abstractmethod
    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Fill a layer from its bytes.

        Parameters
        ----------
        data
            The bytes that :meth:`encode` made of a layer of this shape and dtype.
        out
            ``[2, kv_heads, tokens, head_dim]``, contiguous, on the CPU, in the dtype to decode to.
        """

    @abstractmethod
    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of a layer of this shape and dtype."""


class Raw(Codec):
    """The bytes of the tensors themselves."""

    name = "raw"
    lossless = True

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[memoryview]:
        """Return views of the tensors, without a copy where they are on the CPU."""
        return [_bytes_of(keys), _bytes_of(values)]

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Copy the bytes."""
        flat = torch.frombuffer(data, dtype=torch.uint8)
        out.view(-1).view(torch.uint8).copy_(flat)

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the tensors' size."""
        return math.prod(shape) * dtype.itemsize


class GridCodec(Codec):
    """A layer as codes on uniform grids over groups of numbers.

    The axes are KIVI's (arXiv 2402.02750, section 3.2). Keys differ most between channels: each
    channel has its own grid over a group of tokens. Values differ most between tokens: each token
    has its own grid. Keys are unrotated, which keeps their channels apart.

    A key's grid goes from the group's smallest to its largest number, two float16 a group. A
    value's is centred on 0, and its step is one byte times a float32 of the whole layer, as in
    QLoRA's double quantisation (arXiv 2305.14314, section 3). :mod:`ragkv_kernels` defines the
    layout of the bytes and the arithmetic: float32, one rounding an operation, so that codes are
    the same on every device.
    """

    def __init__(self, name: str, grid: ragkv_kernels.Grid) -> None:
        self.name = name
        self.grid = grid

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[bytes]:
        """Return the layer's grids and codes, computed on the layer's device."""
        made = ragkv_kernels.encode(keys.detach(), values.detach(), grid=self.grid)
        largest = made.largest.view(1).view(torch.uint8)  # one copy to the host for both
        data = torch.cat([made.data, largest]).cpu().numpy().tobytes()
        (number,) = struct.unpack("<f", data[-4:])
        if not number <= LARGEST:  # also true for NaN
            raise StoreError(
                f"codec {self.name} stores keys and values up to {LARGEST:.0f}, and the largest "
                f"is {number:g}: use codec raw for this model"
            )
        return [data[:-4]]

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Compute the numbers of the codes."""
        ragkv_kernels.decode(torch.frombuffer(data, dtype=torch.uint8), out, grid=self.grid)

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:  # noqa: ARG002
        """Return the size of the grids and codes."""
        _, heads, tokens, width = shape
        return sum(self.grid.sizes((heads, tokens, width)))


_CODECS: dict[str, Codec] = {
    "raw": Raw(),
    "int8": GridCodec("int8", ragkv_kernels.INT8),
    "int4": GridCodec("int4", ragkv_kernels.INT4),
}


def codec_of(name: str) -> Codec:
    """Return the codec of this name.

    Raises
    ------
    StoreError
        There is none.
    """
    if name not in _CODECS:
        raise StoreError(f"unknown codec {name!r}; known: {', '.join(_CODECS)}")
    return _CODECS[name]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
