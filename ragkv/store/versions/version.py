"""A version of a chunk, and the same placed in a prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import has_expired
from ragkv.store.versions.overhead import fix_overhead, order_penalty, prefix_overlap

VERSION_OVERHEAD = 1024
"""Bytes counted for each version beside its arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A chunk's KV as it is behind the sink and other chunks, and what it paid to them.

    Attributes
    ----------
    text
        The chunk.
    entry
        The chunk's rows, keys not rotated: they may stand at any position. None while they are
        in the store alone.
    fingerprint
        That of the chunk's entry: the model and the sink.
    prefix
        Texts of the chunks before it, in their order.
    inter
        ``[prefix]`` float64: the attention of all its tokens to all tokens of each of them, mean
        over heads and layers.
    intra
        The same to its own tokens.
    impact
        Its CCI, see :func:`ragkv.store.versions.overhead.context_impact`.
    ranks
        ``[tokens]`` int64: each token's rank, from 0, by its attention to the prefix.
    expires_at
        When the first of all these chunks expires, in seconds since the epoch; None for never.
    """

    text: str
    entry: ChunkKV | None
    fingerprint: Fingerprint
    prefix: tuple[str, ...]
    inter: npt.NDArray[np.float64]
    intra: float
    impact: float
    ranks: npt.NDArray[np.int64]
    expires_at: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory."""
        nbytes = VERSION_OVERHEAD + self.inter.nbytes + self.ranks.nbytes
        if self.entry is not None:
            nbytes += self.entry.nbytes + self.entry.token_ids.nbytes + self.entry.offsets.nbytes
        return nbytes

    @property
    def stored_as(self) -> Fingerprint:
        """The fingerprint of its rows in a store: no other context's, and not the entry's."""
        return self.fingerprint.behind(self.prefix)

    @property
    def has_expired(self) -> bool:
        """Whether one of its chunks has expired."""
        return has_expired(self.expires_at, time.time())

    def is_alike(self, other: Version) -> bool:
        """Whether both are of one chunk in one context."""
        mine, others = ((each.text, each.fingerprint, each.prefix) for each in (self, other))
        return mine == others

    def overhead(self, before: Sequence[str]) -> float:
        """Return its CFO at alpha 1 behind other chunks, each named once."""
        overlap = prefix_overlap(self.prefix, self.inter.tolist(), before)
        return fix_overhead(self.impact, overlap, order_penalty(self.prefix, before))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedVersion:
    """A version in a prompt: a :class:`ragkv.chunk.kv.LayeredKV`.

    ``rows`` are the version's; ``overhead`` is its CFO there, at alpha 1.
    """

    version: Version
    rows: ChunkKV
    overhead: float

    @property
    def text(self) -> str:
        """The chunk's text."""
        return self.rows.text

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """``[tokens]``."""
        return self.rows.token_ids

    @property
    def offsets(self) -> npt.NDArray[np.int32]:
        """``[tokens, 2]``."""
        return self.rows.offsets

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.rows.nbytes

    def layers(self, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return layers' keys and values, ``[layers, kv_heads, tokens, head_dim]`` each."""
        return self.rows.layers(which)

    def coded(self, which: slice) -> None:
        """Return None: the layers are decoded."""
        del which

    def whole(self) -> ChunkKV:
        """Return the rows."""
        return self.rows
