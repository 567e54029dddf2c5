"""Which prompt token gets its KV from where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ragkv.chunk.kv import LayeredKV
from ragkv.prompt.tokens import IntArray, Tokens

if TYPE_CHECKING:  # the stores, and the kernels' codecs with them, are loaded later
    from ragkv.store.prefixes.node import PrefixMatch


class Origin(IntEnum):
    """Where a prompt token's KV comes from."""

    SINK = 0
    CACHED = 1
    RECOMPUTED = 2
    FRESH = 3
    CONVERSATION = 4
    PREFIX = 5


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Rows of one cached chunk and the prompt positions where they go.

    ``rows`` and ``slots`` are ``[matched]``, sorted, int64. ``start`` and ``end``
    bound the chunk's span in prompt tokens, fresh tokens at its edges included.
    """

    entry: LayeredKV
    rows: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The plan of a prompt.

    Attributes
    ----------
    ids
        ``[tokens]`` the prompt's token ids.
    offsets
        ``[tokens, 2]`` characters of the prompt's text that each token covers.
    sink
        The first ``sink`` tokens take the shared sink's rows.
    placed
        The cached chunks in prompt order.
    origin
        ``[tokens]`` uint8, an :class:`Origin` each.
    exact
        Cached rows before this position stand as they are. They are those of a full prefill: the
        sink's, and those of the first chunk as far as it follows right behind the whole sink; or
        those of ``continued``.
    continued
        The former prompt's rows that the first positions take, the sink's among them; no chunk
        is placed there.
    """

    ids: IntArray
    offsets: IntArray
    sink: int
    placed: tuple[Placed, ...]
    origin: npt.NDArray[np.uint8]
    exact: int = 0
    continued: PrefixMatch | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def cached(self) -> npt.NDArray[np.int64]:
        """Positions with a cached chunk row, sorted."""
        return np.flatnonzero(self.origin == Origin.CACHED)

    def stale(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the cached positions, sorted, that are neither exact nor among the rows."""
        cached = self.cached
        return np.setdiff1d(cached[cached >= self.exact], rows, assume_unique=True)

    @property
    def fresh(self) -> npt.NDArray[np.int64]:
        """Positions that must be computed in any case, sorted."""
        return np.flatnonzero(self.origin == Origin.FRESH)

    @property
    def query_start(self) -> int:
        """First position after the last chunk; in a prompt that ends with it, the last token."""
        if self.placed:
            return min(self.placed[-1].end, len(self) - 1)
        return self.sink if self.continued is None else self.continued.length


def lay_out(
    tokens: Tokens,
    sink_ids: IntArray,
    found: Sequence[tuple[LayeredKV, int, int]],
    continued: PrefixMatch | None = None,
) -> Layout:
    """Align entries with the prompt's tokens.

    Parameters
    ----------
    tokens
        The whole prompt.
    sink_ids
        Token ids that the entries were encoded behind.
    found
        ``(entry, start, end)`` in prompt order: the characters of the prompt where
        the entry's text, or its head, stands.
    continued
        A former prompt's rows, longer than the sink: entries are placed behind it.

    The prompt's last token is always fresh: its hidden state gives the first logits.
    """
    origin = np.full(len(tokens), Origin.FRESH, dtype=np.uint8)
    sink = min(_common_prefix(tokens.ids, sink_ids), len(tokens) - 1)
    begin = sink
    if continued is not None:
        begin = continued.length
        origin[:begin] = Origin.CONVERSATION if continued.conversation else Origin.PREFIX
    origin[:sink] = Origin.SINK
    placed = []
    for entry, start, end in found:
        piece = _align(tokens, entry, start, end, begin)
        if piece is not None:
            origin[piece.slots] = Origin.CACHED
            placed.append(piece)
    exact = begin
    if placed and continued is None and sink == len(sink_ids):
        exact += _run(placed[0], sink)
    return Layout(tokens.ids, tokens.offsets, sink, tuple(placed), origin, exact, continued)


def _run(piece: Placed, first: int) -> int:
    """Count the chunk's rows that stand as they were encoded, from position ``first`` on."""
    steps = np.arange(len(piece.slots))
    run = (piece.slots == first + steps) & (piece.rows == steps)
    return len(run) if run.all() else int(np.argmin(run))


def _common_prefix(a: IntArray, b: IntArray) -> int:
    """Length of the longest common prefix of two id arrays."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _align(tokens: Tokens, entry: LayeredKV, start: int, end: int, begin: int) -> Placed | None:
    """Match tokens from ``begin`` on that cover the same characters and have the same id."""
    first = int(np.searchsorted(tokens.offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(tokens.offsets[:, 0], end, side="left"))
    first = max(first, begin)
    span = tokens.offsets[first:last].astype(np.int64) - start
    _, here, there = np.intersect1d(
        _keys(span), _keys(entry.offsets.astype(np.int64)), assume_unique=True, return_indices=True
    )
    same = (tokens.ids[first + here] == entry.token_ids[there]) & (span[here, 1] <= end - start)
    slots, rows = first + here[same], there[same]
    keep = slots < len(tokens) - 1
    if not keep.any():
        return None
    return Placed(entry, rows[keep], slots[keep], first, last)


def _keys(offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a number per token that is unique in the span.

    It holds the token's characters, and its rank among tokens that cover the same
    ones (the bytes of one emoji).
    """
    starts = offsets[:, 0]
    rank = np.arange(len(starts)) - np.searchsorted(starts, starts, side="left")
    keys: npt.NDArray[np.int64] = (
        (starts << 32) | (offsets[:, 1] - starts << 8) | np.minimum(rank, 255)
    )
    return keys


def exact_prefix(layout: Layout) -> Layout:
    """Keep only what is an exact token prefix: the sink and the first chunk right behind it."""
    kept: tuple[Placed, ...] = ()
    length = layout.exact - layout.sink
    if length > 0:
        piece = layout.placed[0]
        rows, slots = piece.rows[:length], piece.slots[:length]
        kept = (Placed(piece.entry, rows, slots, piece.start, layout.exact),)
    origin = np.full(len(layout), Origin.FRESH, dtype=np.uint8)
    origin[: layout.sink] = Origin.SINK
    for piece in kept:
        origin[piece.slots] = Origin.CACHED
    return Layout(layout.ids, layout.offsets, layout.sink, kept, origin, layout.exact)
