"""Chunks that retrievers name before the prompt that contains them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

MOST_LISTS = 16
"""Number of lists of named chunks that are kept: the last ones."""

MOST_MISSING = 1000
"""Number of named, missing chunks that are kept: the last ones."""

WAIT_S = 60.0
"""Seconds that a list waits for a prompt of a different context."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The chunks that were named before a prompt.

    Attributes
    ----------
    new
        Named since the last prompt.
    earlier
        Possibly for this prompt: an earlier prompt of the same thread or task took them, or several
        lists of unknown callers wait. Only those in the prompt are reported.
    """

    new: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _NamedList:
    """Chunks that were named in one call."""

    texts: tuple[str, ...]
    owner: NamedChunks
    named_at: float
    is_taken: bool = False


_here: ContextVar[tuple[_NamedList, ...]] = ContextVar("ragkv_named", default=())


class NamedChunks:
    """Chunks that retrievers named: lists until a prompt takes them, and the missing chunks.

    A prompt takes the lists of its own thread or task. Some frameworks (LangChain) run retrievers
    in a separate context: if nothing was named in a prompt's context, the prompt takes the only
    waiting list. If several lists wait, it takes none, since each can belong to another prompt.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_NamedList] = []
        self._missing: dict[str, None] = {}

    @property
    def missing(self) -> list[str]:
        """The named chunks that are not known to be stored, in the order of naming."""
        with self._lock:
            return list(self._missing)

    def add_missing(self, texts: Iterable[str]) -> None:
        """Keep chunks until they are known to be stored."""
        with self._lock:
            for text in texts:
                self._missing.pop(text, None)
                self._missing[text] = None
            while len(self._missing) > MOST_MISSING:
                del self._missing[next(iter(self._missing))]

    def remove_missing(self, texts: Iterable[str]) -> None:
        """Remove chunks that are stored, or are being stored."""
        with self._lock:
            for text in texts:
                self._missing.pop(text, None)

    def add(self, texts: Iterable[str]) -> None:
        """Keep a list of retrieved chunks for the next prompt."""
        named = _NamedList(tuple(filter(None, dict.fromkeys(texts))), self, time.monotonic())
        if not named.texts:
            return
        new = [each for each in _here.get() if not each.is_taken]
        _here.set((*new, named)[-MOST_LISTS:])
        with self._lock:
            self._waiting = [*self._waiting, named][-MOST_LISTS:]

    def take(self) -> Retrieved:
        """Return the chunks of the current context's next prompt."""
        here = [each for each in _here.get() if each.owner is self]
        oldest = time.monotonic() - WAIT_S
        with self._lock:
            new = [each for each in here if not each.is_taken]
            earlier = [each for each in here if each.is_taken]
            waiting = [each for each in self._waiting if each.named_at > oldest]
            if not here and len(waiting) == 1:
                new = waiting
            elif not here:
                earlier = waiting
            for each in new:
                each.is_taken = True
            self._waiting = [each for each in waiting if not each.is_taken]
        return Retrieved(_texts(new), _texts(earlier))


def _texts(lists: Iterable[_NamedList]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for each in lists for text in each.texts))
