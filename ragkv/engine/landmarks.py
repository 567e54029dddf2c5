"""Stored chunks that stand in a prompt in another way than they are stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import numpy as np

from ragkv.engine.rewritten import WINDOW, Rewritten, places_of
from ragkv.prompt.rolling import Hashes, head_hashes

MOST_AT_ONCE = 2000
"""New chunks that are indexed while an answer is accounted for; more are in the background."""

MOST_FOUND = 32
"""Chunks that are found at most: neighbours of one that is there may be alike."""

_PLACES = 3


class Landmarks:
    """The hash of three windows of letters of each stored chunk: 24 bytes a chunk.

    Parameters
    ----------
    is_stored
        Whether a text is a chunk still.
    """

    def __init__(self, is_stored: Callable[[str], bool]) -> None:
        self._is_stored = is_stored
        self._lock = threading.Lock()
        self._new: list[str] = []
        self._texts: list[str] = []
        self._hashes: Hashes = np.empty((0, _PLACES), np.uint64)
        self._sorted: Hashes = np.empty(0, np.uint64)
        self._order = np.empty(0, np.int64)

    def add(self, texts: Iterable[str]) -> None:
        """Note new chunks, to be indexed when a prompt is looked through."""
        with self._lock:
            self._new += texts

    @property
    def is_behind(self) -> bool:
        """Whether so many chunks are new that they are to be indexed in the background."""
        return len(self._new) > MOST_AT_ONCE

    def update(self) -> None:
        """Index the new chunks."""
        with self._lock:
            if not self._new:
                return
            pairs = [(text, places_of(text)) for text in dict.fromkeys(self._new)]
            pairs = [(text, windows) for text, windows in pairs if windows]
            windows = [window for _, mine in pairs for window in mine]
            hashes = np.concatenate(
                [self._hashes, head_hashes(windows, WINDOW).reshape(-1, _PLACES)]
            )
            texts = [*self._texts, *(text for text, _ in pairs)]
            kept = [at for at, text in enumerate(texts) if self._is_stored(text)]
            self._texts, self._hashes = [texts[at] for at in kept], hashes[kept]
            flat = self._hashes.ravel()
            self._order = np.argsort(flat, kind="stable")
            self._sorted = flat[self._order]
            self._new = []

    def find(self, rewritten: Rewritten) -> list[str]:
        """Return the stored chunks that have most of their windows in the prompt."""
        if self.is_behind:
            return []
        self.update()
        with self._lock:
            there = rewritten.has(self._sorted)
            places, counts = np.unique(self._order[there] // _PLACES, return_counts=True)
            likely = places[counts > 1][:MOST_FOUND].tolist()
            texts = [self._texts[at] for at in likely]
        return [text for text in texts if self._is_stored(text)]
