"""ChunkKV: one chunk's keys and values for all layers, encoded behind the sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch


class CodedLayers(NamedTuple):
    """Encoded layers of an entry, for a device that decodes them.

    Attributes
    ----------
    data
        ``[layers, room]`` uint8 on the host, verified, in pinned memory if possible. Each layer
        begins at a multiple of 16 bytes.
    size
        Bytes of each layer; the rest of its room is undefined.
    codec
        The codec's name.
    """

    data: torch.Tensor
    size: int
    codec: str


class LayeredKV(Protocol):
    """A chunk's cache, loaded or lazy; attributes as in :class:`ChunkKV`."""

    @property
    def text(self) -> str:
        """The chunk's text."""
        ...

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """``[tokens]``."""
        ...

    @property
    def offsets(self) -> npt.NDArray[np.int32]:
        """``[tokens, 2]``."""
        ...

    def layers(self, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return layers' keys and values, ``[layers, kv_heads, tokens, head_dim]`` each."""
        ...

    def coded(self, which: slice) -> CodedLayers | None:
        """Return layers as they are stored; None if they are decoded."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, decoded."""
        ...

    def whole(self) -> ChunkKV:
        """Return it with all layers loaded."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class KnownChunk:
    """A chunk with only rows of earlier prompts: a :class:`LayeredKV` whose layers are not read."""

    text: str
    token_ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    nbytes: int = 0

    def layers(self, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise RuntimeError."""
        raise RuntimeError(f"layers {which} of a chunk that has no entry")

    def coded(self, which: slice) -> CodedLayers | None:
        """Raise RuntimeError."""
        raise RuntimeError(f"layers {which} of a chunk that has no entry")

    def whole(self) -> ChunkKV:
        """Raise RuntimeError."""
        raise RuntimeError("a chunk that has no entry")


@dataclass(frozen=True, eq=False, slots=True)
class ChunkKV:
    """A chunk's cache, without the sink's rows.

    Attributes
    ----------
    text
        The chunk's text, stripped of outer whitespace.
    token_ids
        ``[tokens]``, int32: the tokens that the rows belong to.
    offsets
        ``[tokens, 2]``, int32: first character and end of each token in ``text``.
    keys
        ``[layers, kv_heads, tokens, head_dim]`` in the model's dtype, *not rotated*
        (Cache-Craft, section 4): they are rotated once, at their positions in a prompt.
    values
        ``[layers, kv_heads, tokens, head_dim]`` in the model's dtype.
    """

    text: str
    token_ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    keys: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    def layers(self, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return layers' keys and values, ``[layers, kv_heads, tokens, head_dim]`` each."""
        return self.keys[which], self.values[which]

    def coded(self, which: slice) -> None:
        """Return None: the layers are decoded."""

    def whole(self) -> ChunkKV:
        """Return the entry itself."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes
