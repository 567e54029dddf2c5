"""ChunkFinder: known chunks in a prompt, found without separators.

A prompt is scanned once. The hashes of all windows as long as a chunk's head
(:mod:`ragkv.prompt.rolling`) give the few offsets where a chunk can begin, the sorted texts
(:mod:`ragkv.prompt.heads`) give the chunk, and :func:`cover` chooses among overlapping ones.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ragkv.prompt.heads import HeadIndex
from ragkv.prompt.rolling import code_points, window_hashes

MIN_CHARS = 16
"""Fewest characters of a registered chunk; prompts contain shorter texts by chance."""

MIN_HEAD = 48
"""Fewest characters of a truncated chunk; shorter ones save little and are headings or labels."""

_SMALL = 256  # an index up to this size is simply rebuilt when a text is added
_GROWTH = 4  # an index is at least this much larger than the next one
_CHARACTER = 1 << 20  # a character outweighs any number of spans; then fewer spans win


@dataclass(frozen=True, slots=True)
class Span:
    """A known chunk in a prompt: ``prompt[start:end] == text[: end - start]``.

    Attributes
    ----------
    start, end
        Character offsets (indices of the Python string) in the prompt.
    text
        The whole registered text, also where the prompt has only its head.
    """

    start: int
    end: int
    text: str


def is_registrable(text: str) -> bool:
    """Return whether a text is long enough, stripped, to be found in prompts."""
    return len(text.strip()) >= MIN_CHARS


class ChunkFinder:
    """The registered chunks, and where they stand in a prompt.

    Texts are stripped of outer whitespace. Threads may share a finder: ``find`` works
    on the indexes that were there when it began and never waits; one that runs while
    chunks are added or discarded may or may not see those.

    Parameters
    ----------
    texts
        The first chunks to register, as by :meth:`add`.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._live: set[str] = set()
        self._indexes: tuple[HeadIndex, ...] = ()  # never changed in place
        self.add(texts)

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and text.strip() in self._live

    def __len__(self) -> int:
        return len(self._live)

    def add(self, texts: Iterable[str]) -> None:
        """Register chunks; those known already or not registrable are passed over.

        The cost of one more text is O(log n) amortised: it goes to a small index,
        and indexes are merged as they grow.
        """
        stripped = [text.strip() for text in texts]
        with self._lock:
            new = {text for text in stripped if len(text) >= MIN_CHARS} - self._live
            self._live |= new
            for width, texts_of_width in _by_width(new).items():
                self._insert(texts_of_width, width)

    def discard(self, text: str) -> None:
        """Forget a chunk; one that is not registered is no error."""
        with self._lock:
            self._live.discard(text.strip())
            kept = len(self._live)
            if sum(map(len, self._indexes)) > kept + kept // _GROWTH + _SMALL:
                groups = _by_width(self._live).items()
                self._indexes = tuple(HeadIndex(texts, width) for width, texts in groups)

    def find(self, prompt: str) -> list[Span]:
        """Return the known chunks in a prompt, in order, none overlapping another.

        At each place the longest chunk that stands there whole is preferred, and of
        those that overlap, those are kept which cover the most characters. Between
        them, chunks that the prompt cuts off (by its end, by other text or by a whole
        chunk) are found up to their cut if that is at least ``MIN_HEAD`` characters.

        Which of several chunks with the same head a cut-off one is cannot be known;
        any of them serves, because the head is what they share.
        """
        places = self._places(prompt)
        whole: dict[int, Span] = {}
        for start, index in places:
            text = index.whole(prompt, start, self._live)
            if text is not None:
                _keep_longest(whole, Span(start, start + len(text), text))
        found = _choose(whole)
        cut: dict[int, Span] = {}
        for start, index in places:
            limit = _free_until(start, found, len(prompt))
            if index.width == MIN_HEAD and limit - start >= MIN_HEAD:
                head = index.head(prompt, start, self._live)
                if head is not None and head[0] >= MIN_HEAD:
                    _keep_longest(cut, Span(start, min(start + head[0], limit), head[1]))
        return sorted(found + _choose(cut, MIN_HEAD), key=lambda span: span.start)

    def _places(self, prompt: str) -> list[tuple[int, HeadIndex]]:
        """Return the offsets where a chunk of an index may begin."""
        indexes = self._indexes
        if not indexes:
            return []
        codes = code_points(prompt)
        hashes = {width: window_hashes(codes, width) for width in (MIN_CHARS, MIN_HEAD)}
        return [
            (start, index)
            for index in indexes
            for start in index.candidates(hashes[index.width]).tolist()
        ]

    def _insert(self, texts: list[str], width: int) -> None:
        """Add new texts as an index, merged with those that are not much larger."""
        others = [index for index in self._indexes if index.width != width]
        mine = [index for index in self._indexes if index.width == width]
        runs, count = [sorted(texts)], len(texts)
        while mine and len(mine[-1]) <= max(_SMALL, _GROWTH * count):
            index = mine.pop()
            runs.insert(0, index.texts)
            count += len(index)
        # Discarded texts go here; sorting sorted runs is a merge.
        merged = dict.fromkeys(text for run in runs for text in run if text in self._live)
        self._indexes = (*others, *mine, HeadIndex(merged, width))


def _by_width(texts: Iterable[str]) -> dict[int, list[str]]:
    """Group texts by the length of the head that they are found by."""
    groups: dict[int, list[str]] = {}
    for text in texts:
        groups.setdefault(MIN_HEAD if len(text) >= MIN_HEAD else MIN_CHARS, []).append(text)
    return groups


def _keep_longest(spans: dict[int, Span], span: Span) -> None:
    known = spans.get(span.start)
    if known is None or known.end < span.end:
        spans[span.start] = span


def _choose(spans: dict[int, Span], shortest: int | None = None) -> list[Span]:
    """Return the spans that cover the most, by :func:`cover`."""
    ordered = [spans[start] for start in sorted(spans)]
    starts, ends = [span.start for span in ordered], [span.end for span in ordered]
    return [
        Span(ordered[k].start, end, ordered[k].text) for k, end in cover(starts, ends, shortest)
    ]


def _free_until(start: int, spans: Sequence[Span], length: int) -> int:
    """Return where the free text at ``start`` ends; ``start`` itself if it is not free."""
    after = bisect_right(spans, start, key=lambda span: span.start)
    if after and spans[after - 1].end > start:
        return start
    return spans[after].start if after < len(spans) else length


def cover(
    starts: Sequence[int], ends: Sequence[int], shortest: int | None = None
) -> list[tuple[int, int]]:
    """Choose the spans that together cover the most characters without overlapping.

    Dynamic programming from the last span to the first (weighted interval
    scheduling). Of equal covers one with the fewest spans is taken.

    Parameters
    ----------
    starts, ends
        The candidates, at most one a start, in ascending order of ``starts``.
    shortest
        A span may be cut where the next one begins if this many characters of it
        remain. ``None``: spans are taken whole or not at all.

    Returns
    -------
    list of (candidate, end)
        The chosen candidates' indices in ascending order, each with its end.
    """
    count = len(starts)
    worth = np.zeros(count + 1, np.int64)  # of the best cover by candidates k, k + 1, ...
    reach = np.zeros(count, np.int64)  # the same, plus the characters in front of k
    taken: list[tuple[int, int] | None] = [None] * count  # (end, next candidate)
    for k in range(count - 1, -1, -1):
        start, end = starts[k], ends[k]
        after = bisect_left(starts, end, lo=k + 1)
        best, choice = end * _CHARACTER + int(worth[after]), (end, after)
        if shortest is not None:
            first = bisect_left(starts, start + shortest, lo=k + 1)
            if first < after:
                cut = first + int(reach[first:after].argmax())
                if reach[cut] > best:
                    best, choice = int(reach[cut]), (starts[cut], cut)
        best -= start * _CHARACTER + 1
        if best >= worth[k + 1]:
            taken[k] = choice
        worth[k] = max(best, int(worth[k + 1]))
        reach[k] = start * _CHARACTER + worth[k]
    chosen, k = [], 0
    while k < count:
        choice_k = taken[k]
        if choice_k is None:
            k += 1
        else:
            chosen.append((k, choice_k[0]))
            k = choice_k[1]
    return chosen
