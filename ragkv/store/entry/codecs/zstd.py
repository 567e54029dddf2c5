"""Any codec's bytes, compressed with zstd; nothing more is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ragkv.errors import MissingDependencyError, install_command
from ragkv.store.entry.codecs.base import Codec

LEVEL = 3


class Zstd(Codec):
    """Compresses what another codec makes.

    The bytes of raw numbers are sorted by their place in the number before, as Blosc's
    shuffle does: signs and exponents, which repeat, then stand together.

    Raises
    ------
    MissingDependencyError
        The package ``zstandard`` is not installed.
    """

    def __init__(self, inner: Codec) -> None:
        self._zstandard = load_zstandard()
        self._inner = inner
        self.name = f"{inner.name}+zstd"
        self.lossless = inner.lossless

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[bytes]:
        """Return one frame."""
        data = np.frombuffer(b"".join(self._inner.encode(keys, values)), dtype=np.uint8)
        width = self._width(keys.dtype)
        planes = np.ascontiguousarray(data.reshape(-1, width).T)
        return [self._zstandard.ZstdCompressor(level=LEVEL).compress(planes)]

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Decompress, and let the other codec decode."""
        self._inner.decode(self.expand(data, out.shape, out.dtype), out)

    @property
    def plain(self) -> Codec:
        """The codec whose bytes are compressed."""
        return self._inner

    def expand(self, data: memoryview, shape: Sequence[int], dtype: torch.dtype) -> memoryview:
        """Decompress; a frame that says another size than the layer's is refused unread."""
        try:
            size = self._zstandard.frame_content_size(data)
            if not self._inner.fits(size, shape, dtype):
                raise ValueError(f"a frame of {size} bytes is none of this layer")
            planes = self._zstandard.ZstdDecompressor().decompress(data)
        except self._zstandard.ZstdError as error:
            raise ValueError(f"no frame of zstd: {error}") from error
        numbers = np.frombuffer(planes, dtype=np.uint8).reshape(self._width(dtype), -1).T.copy()
        return numbers.reshape(-1).data

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the size before compression."""
        return self._inner.size(shape, dtype)

    def fits(self, size: int, shape: Sequence[int], dtype: torch.dtype) -> bool:  # noqa: ARG002
        """Any size may be."""
        return size > 0

    def _width(self, dtype: torch.dtype) -> int:
        return dtype.itemsize if self._inner.lossless else 1


def load_zstandard() -> Any:
    """Return the package.

    Raises
    ------
    MissingDependencyError
        It is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise MissingDependencyError(
            f"codecs with zstd need zstandard: {install_command('zstd')}"
        ) from error
    return zstandard
