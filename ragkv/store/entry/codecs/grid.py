"""Uniform grids over groups of numbers: what int8 and int4 share.

KIVI's axes (arXiv 2402.02750, section 3.2): keys differ most between channels, so each
channel has its own grid over a group of tokens; values differ most between tokens, so each
token has its own. Keys are unrotated, which keeps their channels apart.

A key's grid goes from the group's smallest to its largest, two float16 a group. A value's
is centred on 0, and its step is one byte times a float32 of the whole layer, as in QLoRA's
double quantisation (arXiv 2305.14314, section 3). :mod:`ragkv_kernels` has the layout of the
bytes and the arithmetic: float32, one rounding an operation, so that codes are the same on
every device.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar

import ragkv_kernels
import torch

from ragkv.errors import StoreError
from ragkv.store.entry.codecs.base import Codec

LARGEST = 32768.0
"""Largest number that can be stored: decoded and rounded up, it still fits float16."""


class GridCodec(Codec):
    """A layer as codes on grids."""

    grid: ClassVar[ragkv_kernels.Grid]

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[bytes]:
        """Return the layer's grids and codes, made on the layer's device."""
        made = ragkv_kernels.encode(keys.detach(), values.detach(), grid=self.grid)
        largest = made.largest.view(1).view(torch.uint8)  # crosses together with the data
        data = torch.cat([made.data, largest]).cpu().numpy().tobytes()
        self._check(*struct.unpack("<f", data[-4:]))
        return [data[:-4]]

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Compute the numbers of the codes."""
        ragkv_kernels.decode(torch.frombuffer(data, dtype=torch.uint8), out, grid=self.grid)

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:  # noqa: ARG002
        """Return the size of the grids and codes."""
        _, heads, tokens, width = shape
        return sum(self.grid.sizes((heads, tokens, width)))

    def _check(self, largest: float) -> None:
        if not largest <= LARGEST:  # also where something is not a number
            raise StoreError(
                f"codec {self.name} stores keys and values up to {LARGEST:.0f}, and the largest "
                f"is {largest:g}: use codec raw for this model"
            )
