"""Contextual versions of chunks, and how much of a version must be recomputed in a prompt.

Cache-Craft, arXiv 2502.15734, section 3: a chunk's rows were computed behind some chunks (old) and
are used behind others (new).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.tokens import IntArray
from ragkv.store.types import has_expired

NO_CONTEXT = 0.5
"""CFO, at alpha 1, of rows computed directly behind the sink: CCI without a context."""


class PathSpan(NamedTuple):
    """A chunk's place in a path.

    Attributes
    ----------
    ids
        The path's tokens up to the chunk's last one.
    offsets
        ``[tokens, 2]`` the characters of the chunk that each token covers.
    """

    ids: IntArray
    offsets: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A chunk's KV behind the sink and other chunks, and its attention to them.

    Attributes
    ----------
    text
        The chunk.
    fingerprint
        That of the chunk's entry: the model and the sink.
    prefix
        Texts of the chunks before it, in their order.
    inter
        ``[prefix]`` float64: the attention of all its tokens to all tokens of each of these
        chunks, mean over heads and layers.
    intra
        Its attention to its own tokens.
    impact
        Its CCI, see :func:`context_impact`.
    ranks
        ``[tokens]`` int64: each token's rank, from 0, by its attention to the prefix.
    path
        A digest of all tokens up to its last one, see :func:`digest_of_path`.
    first
        Position of its first token there.
    expires_at
        The earliest expiry time of all these chunks, in seconds since the epoch; None for never.
    place
        Its rows' place in the tree; None if only the store has them.
    """

    text: str
    fingerprint: Fingerprint
    prefix: tuple[str, ...]
    inter: npt.NDArray[np.float64]
    intra: float
    impact: float
    ranks: npt.NDArray[np.int64]
    path: str
    first: int
    expires_at: float | None = None
    place: PathSpan | None = None

    @property
    def stored_as(self) -> Fingerprint:
        """The fingerprint of its rows in a store, unique to its context."""
        return self.fingerprint.behind(self.prefix)

    @property
    def has_expired(self) -> bool:
        """Whether one of its chunks has expired."""
        return has_expired(self.expires_at, time.time())

    def is_alike(self, other: Version) -> bool:
        """Whether both are of the same chunk in the same context."""
        mine, others = ((each.text, each.fingerprint, each.prefix) for each in (self, other))
        return mine == others

    def overhead(self, before: Sequence[str]) -> float:
        """Return its CFO at alpha 1 behind other chunks, each given once."""
        overlap = prefix_overlap(self.prefix, self.inter.tolist(), before)
        return fix_overhead(self.impact, overlap, order_penalty(self.prefix, before))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedVersion(ChunkKV):
    """The rows of a version in a prompt; ``overhead`` is its CFO there, at alpha 1."""

    version: Version
    overhead: float

    @classmethod
    def of(cls, version: Version, rows: ChunkKV, overhead: float) -> Self:
        """Return a version's rows with its overhead in a prompt."""
        return cls(
            rows.text, rows.token_ids, rows.offsets, rows.keys, rows.values, version, overhead
        )


def digest_of_path(ids: IntArray) -> str:
    """Return a digest of a path's tokens, ``[tokens]``."""
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).hexdigest()


def context_impact(
    between: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return ``[chunks]`` the cache context impact, CCI, from 1/2 (no context) to 1.

    ``CCI_i = 1 / (1 + exp(-a / b))`` with ``a = sum over j < i of inter_ij / (|Ci| |Cj|)``
    and ``b = intra_i / |Ci|^2``.

    Parameters
    ----------
    between
        ``[chunks, chunks]``: the attention of all tokens of chunk i to all tokens of chunk
        j, averaged over layers and heads; ``intra`` is its diagonal.
    sizes
        ``[chunks]`` tokens of each chunk.
    """
    density = between / np.outer(sizes, sizes)
    earlier, own = np.tril(density, -1).sum(axis=1), np.diag(density)
    impact: npt.NDArray[np.float64] = 1 / (1 + np.exp(-earlier / np.maximum(own, 1e-30)))
    return impact


def prefix_overlap(old: Sequence[str], inter: Sequence[float], new: Sequence[str]) -> float:
    """Return beta, from 0 to 1: the share of the attention to old chunks that are among the new.

    Parameters
    ----------
    old, new
        The chunks before this one, each once.
    inter
        The attention of this chunk's tokens to each of the old ones. If all of it is 0, the overlap
        is 1.
    """
    total, known = sum(inter), set(new)
    kept = sum(paid for text, paid in zip(old, inter, strict=True) if text in known)
    return kept / total if total > 0 else 1.0


def order_penalty(old: Sequence[str], new: Sequence[str]) -> float:
    """Return gamma, from 0 to 1: Kendall's tau distance of the common chunks' two orders.

    It is the share of pairs in reverse order; 0 if there is no pair.
    """
    place = {text: at for at, text in enumerate(new)}
    pairs = list(combinations([place[text] for text in old if text in place], 2))
    return sum(first > second for first, second in pairs) / max(1, len(pairs))


def fix_overhead(impact: float, overlap: float, penalty: float, alpha: float = 1.0) -> float:
    """Return the cache fix overhead, ``CFO = alpha CCI (1 - beta (1 - gamma))``, from 0 to 1."""
    return min(1.0, max(0.0, alpha * impact * (1 - overlap * (1 - penalty))))
