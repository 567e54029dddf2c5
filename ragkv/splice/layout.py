"""The layout of a prompt: the origin of each token's KV."""

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
    from ragkv.history.node import PrefixMatch


class Origin(IntEnum):
    """The origin of a prompt token's KV.

    CACHED comes from an entry, EXACT and REPAIRED from an earlier prompt. VERSION, only in reports,
    comes from a version in place of an entry.
    """

    SINK = 0
    CACHED = 1
    RECOMPUTED = 2
    FRESH = 3
    EXACT = 4
    REPAIRED = 5
    VERSION = 6


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Rows of one cached chunk and their positions in the prompt.

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
        ``[tokens, 2]`` characters of the prompt's text covered by each token.
    sink
        The first ``sink`` tokens take the shared sink's rows.
    placed
        The cached chunks in prompt order.
    origin
        ``[tokens]`` uint8, an :class:`Origin` each.
    exact
        Entries' rows before this position equal those of a full prefill: the sink's, and those of
        the first chunk up to its first gap if it directly follows the whole sink.
    history
        Rows of earlier prompts, used in place of entries' rows.
    """

    ids: IntArray
    offsets: IntArray
    sink: int
    placed: tuple[Placed, ...]
    origin: npt.NDArray[np.uint8]
    exact: int = 0
    history: PrefixMatch | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def cached(self) -> npt.NDArray[np.int64]:
        """Positions of the placed chunks' tokens, sorted, including those with an earlier row."""
        inside = self.origin == Origin.CACHED
        for piece in self.placed:
            inside[piece.slots] = True
        return np.flatnonzero(inside)

    @property
    def continued(self) -> int:
        """End of the longest earlier prompt that this one continues, 0 for none.

        That prompt's query has chosen tokens of its chunks, and all rows behind them are known.
        """
        end = 0 if self.history is None else self.history.prompt_end
        ends = [piece.end for piece in self.placed if piece.end <= end]
        is_known = (self.origin[max(ends, default=0) : end] != Origin.FRESH).all()
        return end if is_known else 0

    @property
    def known(self) -> npt.NDArray[np.int64]:
        """Positions of the placed chunks' tokens with an earlier prompt's row, sorted."""
        cached = self.cached
        return cached[self.origin[cached] >= Origin.EXACT]

    @property
    def compared(self) -> npt.NDArray[np.int64]:
        """Positions of the known tokens of chunks with a stale row, sorted."""
        known = self.known
        if not len(known):
            return known
        slots = [piece.slots for piece in self.placed if self.has_stale(piece)]
        return np.intersect1d(known, np.concatenate([*slots, np.zeros(0, np.int64)]))

    def has_stale(self, piece: Placed) -> bool:
        """Whether a chunk has an entry's row that is not exact."""
        stale = self.origin[piece.slots] == Origin.CACHED
        return bool((stale & (piece.slots >= self.exact)).any())

    def stale(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sorted positions of entries' rows that are not exact, except ``rows``."""
        inside = self.origin == Origin.CACHED
        inside[: self.exact] = False
        inside[rows] = False
        return np.flatnonzero(inside)

    @property
    def fresh(self) -> npt.NDArray[np.int64]:
        """Positions that are always computed, sorted."""
        return np.flatnonzero(self.origin == Origin.FRESH)

    @property
    def known_end(self) -> int:
        """Position after the last row that is known before the prompt is computed."""
        return int(np.flatnonzero(self.origin != Origin.FRESH).max(initial=-1)) + 1

    @property
    def query_start(self) -> int:
        """First fresh position after the last chunk; the last token if there is none."""
        end = self.placed[-1].end if self.placed else self.sink
        behind = np.flatnonzero(self.origin[end:] == Origin.FRESH)
        return end + int(behind[0]) if len(behind) else len(self) - 1


def lay_out(
    tokens: Tokens,
    sink_ids: IntArray,
    found: Sequence[tuple[LayeredKV, int, int]],
    history: PrefixMatch | None = None,
) -> Layout:
    """Align entries with the prompt's tokens.

    Parameters
    ----------
    tokens
        The whole prompt.
    sink_ids
        Token ids of the sink of the entries.
    found
        ``(entry, start, end)`` in prompt order: the characters of the prompt with the entry's text,
        or its beginning.
    history
        Rows of earlier prompts, without the last token.

    The prompt's last token is always fresh: its hidden state gives the first logits.
    """
    origin = np.full(len(tokens), Origin.FRESH, dtype=np.uint8)
    sink = min(_common_prefix(tokens.ids, sink_ids), len(tokens) - 1)
    placed = []
    for entry, start, end in found:
        piece = _align(tokens, entry, start, end, sink)
        if piece is not None:
            origin[piece.slots] = Origin.CACHED
            placed.append(piece)
    if history is not None:
        origin[history.positions] = np.where(history.is_exact, Origin.EXACT, Origin.REPAIRED)
    origin[:sink] = Origin.SINK
    right_behind = bool(placed) and sink == len(sink_ids)
    end = sink + (_run(placed[0], sink) if right_behind else 0)
    if (origin[sink:end] == Origin.REPAIRED).any():
        end = sink
    return Layout(tokens.ids, tokens.offsets, sink, tuple(placed), origin, end, history)


def _run(piece: Placed, first: int) -> int:
    """Count the chunk's contiguous rows from its first one at position ``first`` on."""
    steps = np.arange(len(piece.slots))
    run = (piece.slots == first + steps) & (piece.rows == steps)
    return len(run) if run.all() else int(np.argmin(run))


def _common_prefix(a: IntArray, b: IntArray) -> int:
    """Return the length of the longest common prefix of two id arrays."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _align(tokens: Tokens, entry: LayeredKV, start: int, end: int, begin: int) -> Placed | None:
    """Match tokens from ``begin`` on with the same characters and the same id."""
    touched = tokens.touching(start, end)
    first, last = max(touched.start, begin), touched.stop
    span, own = tokens.offsets[first:last].astype(np.int64) - start, entry.offsets
    ids = tokens.ids[first:last]
    # most tokens, or all, are the same from the first one on; only the others are searched
    size = min(len(span), len(own))
    equal = (span[:size] == own[:size]).all(axis=1) & (ids[:size] == entry.token_ids[:size])
    run = size if equal.all() else int(equal.argmin())
    here = there = np.arange(run)
    if run < size:
        _, *rest = np.intersect1d(
            _keys(span[run:]),
            _keys(own[run:].astype(np.int64)),
            assume_unique=True,
            return_indices=True,
        )
        here, there = (np.concatenate([np.arange(run), run + part]) for part in rest)
    same = (ids[here] == entry.token_ids[there]) & (span[here, 1] <= end - start)
    slots, rows = first + here[same], there[same]
    keep = slots < len(tokens) - 1
    if not keep.any():
        return None
    return Placed(entry, rows[keep], slots[keep], first, last)


def _keys(offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a number per token that is unique in the span.

    It encodes the token's characters, and its rank among tokens that cover the same characters (the
    bytes of one emoji).
    """
    starts = offsets[:, 0]
    rank = np.arange(len(starts)) - np.searchsorted(starts, starts, side="left")
    keys: npt.NDArray[np.int64] = (
        (starts << 32) | (offsets[:, 1] - starts << 8) | np.minimum(rank, 255)
    )
    return keys


def exact_prefix(layout: Layout) -> Layout:
    """Keep only the exact token prefix: the sink and the first chunk directly behind it."""
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
