"""The bytes of the tensors themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ragkv.store.entry.codecs.base import Codec


class Raw(Codec):
    """Keeps keys and values as they are."""

    name = "raw"
    lossless = True

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[memoryview]:
        """Return views of the tensors where they lie on the CPU, without a copy."""
        return [_bytes_of(keys), _bytes_of(values)]

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Copy."""
        flat = torch.frombuffer(data, dtype=torch.uint8)
        out.view(-1).view(torch.uint8).copy_(flat)

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the tensors' size."""
        return math.prod(shape) * dtype.itemsize


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
