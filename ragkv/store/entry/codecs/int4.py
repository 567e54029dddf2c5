"""4 bits a number: a quarter of 16-bit."""

from __future__ import annotations

import torch

from ragkv.store.entry.codecs.grid import GridCodec


class Int4(GridCodec):
    """Two codes a byte: the first half of them in the low bits, the second in the high."""

    name = "int4"
    levels = 16
    key_group = 256
    value_group = 128

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the bytes; of an odd number of codes the last byte's high bits are 0."""
        half = (len(codes) + 1) // 2
        packed = codes[:half].clone()
        packed[: len(codes) - half] |= codes[half:] << 4
        return packed

    def unpack(self, data: torch.Tensor, count: int) -> torch.Tensor:
        """Return both halves, one behind the other."""
        return torch.cat([data & 15, data >> 4])[:count]
