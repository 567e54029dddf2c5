"""The contract that every backend keeps: bytes by key, in the order of keys."""

from __future__ import annotations

import mmap
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ragkv.errors import StoreError

LONG_WAIT_S = 1.0
"""Seconds of a failed call from which on it counts as a timeout. A refused connection is faster."""
_LONGEST_S = 30.0
"""Most seconds of an outage."""

Bytes = bytes | bytearray | memoryview
"""Types of values to write. Parts are written one after the other."""

Blob = bytes | bytearray | memoryview | mmap.mmap
"""Types of values that are read, each whole. A mapping is private (copy-on-write)."""


class Key(NamedTuple):
    """A key found by a scan, and the size of its value in bytes."""

    name: str
    nbytes: int


class Backend(ABC):
    """Stores values by key. Several threads and processes can use one place at once.

    Keys are names joined by ``/``, at most 512 characters in all. A name consists of ASCII letters,
    digits and ``-_.`` and begins with a letter or digit; a write under anything else raises
    ValueError. Writes are atomic: a reader gets all that one call wrote, or nothing. Acknowledged
    writes survive a crash of this process, and of the machine where the place promises that.

    Other programs can damage a value. Then its remains are returned, perhaps empty; it has no size
    if the damage shows without reading it. Only :meth:`damaged_keys` returns a damaged key.

    Raises
    ------
    StoreFullError
        From writes: the place or its quota is full; the old value stays.
    StoreError
        From every method: the place cannot be reached, read or written; the message has a remedy.
    """

    remote: bool = False
    """Whether calls cross a network, where several at once take as long as one."""

    private: bool = False
    """Whether no other program can change the values, so that they need no verification."""

    @abstractmethod
    def get(self, key: str) -> Blob | None:
        """Return the whole value, or None."""

    def get_many(self, keys: Iterable[str]) -> Iterator[Blob | None]:
        """Yield the value of each key, in order; over a network faster than ``get``."""
        return map(self.get, keys)

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Return the value's size in bytes without reading it, or None."""

    @abstractmethod
    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        """Write a value, replacing an existing one."""

    def check_room(self, key: str, nbytes: int) -> None:
        """Raise StoreFullError if there is no room for a value of that length.

        An early check before related rows are written; ``put`` enforces the limit.
        """
        del key, nbytes

    def free_bytes(self) -> tuple[int, str] | None:
        """Return the free bytes of the disk, and its folder; None if unknown."""
        return None

    @abstractmethod
    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        """Write a value unless there is one; only one of several concurrent callers gets True."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a value; return whether there was one."""

    def delete_unchanged(self, key: str, seen: Blob) -> bool:
        """Remove a value unless it changed since it was read; return whether it is gone."""
        now = self.get(key)
        return now is None or (memoryview(now) == memoryview(seen) and self.delete(key))

    def scan(self, prefix: str, after: str = "") -> Iterator[Key]:
        """Yield the keys with this prefix that sort after ``after``, in order.

        Keys that are added or deleted meanwhile can be missing; all remaining ones are included.
        """
        return (key for key in self.listed(prefix, after) if is_key(key.name))

    def damaged_keys(self) -> Iterator[Key]:
        """Yield damaged keys; ``delete`` removes them by these names."""
        return (key for key in self.listed("") if not is_key(key.name))

    @abstractmethod
    def listed(self, prefix: str, after: str = "") -> Iterator[Key]:
        """Yield keys as :meth:`scan` does, damaged ones included."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections; the backend cannot be used afterwards."""


class Outage:
    """Circuit breaker: after a timeout, calls fail immediately for the same length of time."""

    def __init__(self) -> None:
        self._until = 0.0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Raise StoreError during an outage, which begins with a StoreError after a long wait."""
        began = time.monotonic()
        if began < self._until:
            raise StoreError("the store timed out just now: it is not called again yet")
        try:
            yield
        except StoreError:
            waited = time.monotonic() - began
            if waited > LONG_WAIT_S:  # any length if the process was suspended
                self._until = began + waited + min(waited, _LONGEST_S)
            raise


_KEY = re.compile(r"(?!.{513})[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*", re.ASCII)


def is_key(name: str) -> bool:
    """Whether a name is a valid key."""
    return _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return a valid key; raise ValueError for any other."""
    if not is_key(key):
        raise ValueError(f"{key!r} is no key: names of letters, digits and -_. joined by /")
    return key


def length_of(parts: Sequence[Bytes]) -> int:
    """Return the size of a value in bytes."""
    return sum(memoryview(part).nbytes for part in parts)
