"""Which chunks were retrieved for a prompt: those that were named before it was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass

MOST_LISTS = 16
"""Lists of named chunks that wait for their prompt: the last ones."""


@dataclass(slots=True, eq=False)
class NamedList:
    """Chunks that were named at once.

    Attributes
    ----------
    age
        Prompts since some were found, or said to be left out; 0 for a new list.
    """

    texts: list[str]
    age: int = 0


_here: ContextVar[tuple[NamedList, ...]] = ContextVar("ragkv_named", default=())


class NamedChunks:
    """Chunks that retrievers named, until they are accounted for.

    A retriever and the model that answers know nothing of one another, and other callers' lists
    may wait, too. A list belongs to the next prompt of its thread or task, to one that has chunks
    of it, or, where no other one waits, to the next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lists: list[NamedList] = []

    def add(self, texts: Iterable[str]) -> None:
        """Note chunks that were retrieved."""
        named = NamedList(list(filter(None, dict.fromkeys(texts))))
        _here.set((*_here.get(), named)[-MOST_LISTS:])
        self._add(named)

    def take(self) -> list[NamedList]:
        """Return the lists that belong to the prompt that is asked now, as far as that is known."""
        mine = _here.get()
        with self._lock:
            new = [each for each in self._lists if not each.age]
            taken = [each for each in new if each in mine] or (new if len(new) == 1 else [])
            self._lists = [each for each in self._lists if each not in taken and each.age < 2]
            for each in self._lists:
                each.age += bool(each.age)
        if taken:
            _here.set(tuple(each for each in mine if each not in taken))
        return taken

    def claim(
        self, taken: Iterable[NamedList], is_in_prompt: Callable[[str], bool]
    ) -> dict[str, None]:
        """Return the chunks that a prompt accounts for, of lists that were taken and of others'.

        What it has nothing of waits for one of the next prompts, which may have it.
        """
        texts: dict[str, None] = {}
        for named in (*taken, *self._take_those_in(is_in_prompt)):
            absent = [text for text in named.texts if not is_in_prompt(text)]
            if not named.age or len(absent) < len(named.texts):
                self._add(NamedList(absent, age=1))
            told = set(absent) if named.age else set()
            texts |= dict.fromkeys(text for text in named.texts if text not in told)
        return texts

    def _take_those_in(self, is_in_prompt: Callable[[str], bool]) -> list[NamedList]:
        """Return the other lists of which the prompt has chunks.

        Of two lists with the same chunks there, that with the fewer others.
        """
        with self._lock:
            lists = list(self._lists)
        there = [(each, {text for text in each.texts if is_in_prompt(text)}) for each in lists]
        there.sort(key=lambda pair: len(pair[1]) / len(pair[0].texts), reverse=True)
        taken, seen = list[NamedList](), set[str]()
        for each, texts in there:
            if texts - seen:
                taken.append(each)
                seen |= texts
        with self._lock:
            self._lists = [each for each in self._lists if each not in taken]
        return taken

    def _add(self, named: NamedList) -> None:
        if named.texts:
            with self._lock:
                self._lists = [*self._lists, named][-MOST_LISTS:]
