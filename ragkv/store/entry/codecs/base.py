"""The contract of codecs: one layer's keys and values to bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

Part = bytes | memoryview
"""Bytes to be written, one part behind the other."""


class Codec(ABC):
    """Turns one layer's keys and values into bytes and back.

    A layer's shape is ``(2, kv_heads, tokens, head_dim)``, keys first; no size is 0.
    """

    name: str
    """The fingerprint's ``codec``."""

    lossless: bool = False
    """Whether what is decoded is to the last bit what was encoded."""

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
            The numbers cannot be kept in this codec: not finite, or too large.
        """

    @abstractmethod
    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Fill a layer from its bytes.

        Parameters
        ----------
        data
            The bytes that ``encode`` made of a layer of this shape and dtype.
        out
            ``[2, kv_heads, tokens, head_dim]``, contiguous, on the CPU, in the dtype in which
            it is wanted.
        """

    @abstractmethod
    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of a layer of this shape and dtype."""
