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

LONG_WAIT_S, _LONGEST_S = 1.0, 30.0
"""A refused connection fails in less, and is tried again by the next call."""

Bytes = bytes | bytearray | memoryview
"""What may be written. Parts are written one behind the other."""

Blob = bytes | bytearray | memoryview | mmap.mmap
"""What is read: a buffer of the whole value. A mapping is private (copy-on-write)."""


class Key(NamedTuple):
    """A key that a scan found, and the bytes of its value."""

    name: str
    nbytes: int


class Backend(ABC):
    """Keeps values by key. Several threads and processes may use one place at once.

    Keys are names joined by ``/``, at most 512 characters in all. A name is made of ASCII
    letters, digits and ``-_.`` and begins with a letter or digit; a write under anything else
    raises ValueError. A value is never seen in
    part: a reader gets all of what one call wrote, or nothing. What was acknowledged
    survives a crash of this process, and of the machine where the place can promise that.

    Somebody else may damage a value. What is left of it is returned, empty where nothing
    is; where it can be seen without reading that it is damaged, it has no size. A damaged key is
    seen by :meth:`damaged_keys` only.

    Raises
    ------
    StoreFullError
        From writes: the place or its quota is full; the old value stands.
    StoreError
        From every method: the place cannot be reached, read or written. Typed, and with
        what to do about it.
    """

    remote: bool = False
    """Whether calls cross a network: several at once take no longer than one."""

    private: bool = False
    """Whether nobody else can change the values, so that they need no verification."""

    @abstractmethod
    def get(self, key: str) -> Blob | None:
        """Return the whole value, or None where there is none."""

    def get_many(self, keys: Iterable[str]) -> Iterator[Blob | None]:
        """Yield the value of each key, in order; faster than ``get`` where places are far."""
        return map(self.get, keys)

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Return the value's bytes without reading it, or None where there is none."""

    @abstractmethod
    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        """Write a value, replacing the one that is there."""

    def check_room(self, key: str, nbytes: int) -> None:
        """Raise StoreFullError where a value of that length would not be taken.

        Asked before other rows are written for it; ``put`` itself is what holds the limit.
        """
        del key, nbytes

    def free_bytes(self) -> tuple[int, str] | None:
        """Return the bytes that the disk has left, and where; None where that is not known."""
        return None

    @abstractmethod
    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        """Write a value unless there is one; of several callers at once one gets True."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a value; return whether there was one."""

    def delete_unchanged(self, key: str, seen: Blob) -> bool:
        """Remove a value unless it changed since it was read; return whether it is gone."""
        now = self.get(key)
        return now is None or (memoryview(now) == memoryview(seen) and self.delete(key))

    def scan(self, prefix: str, after: str = "") -> Iterator[Key]:
        """Yield the keys that begin with ``prefix`` and come behind ``after``, sorted.

        Keys that come or go meanwhile may be missing or there; all others are there.
        """
        return (key for key in self.listed(prefix, after) if is_key(key.name))

    def damaged_keys(self) -> Iterator[Key]:
        """Yield what stands where keys do and is none; ``delete`` removes it by that name."""
        return (key for key in self.listed("") if not is_key(key.name))

    @abstractmethod
    def listed(self, prefix: str, after: str = "") -> Iterator[Key]:
        """Yield keys as :meth:`scan`, damaged ones among them."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections; the backend can not be used afterwards."""


class Outage:
    """After a call that waited in vain, others fail at once for as long: they compute instead."""

    def __init__(self) -> None:
        self._until = 0.0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Raise StoreError during an outage; one begins with a StoreError after a long wait."""
        began = time.monotonic()
        if began < self._until:
            raise StoreError("the store has just let a call wait in vain: it is not called again")
        try:
            yield
        except StoreError:
            waited = time.monotonic() - began
            if waited > LONG_WAIT_S:  # of a process that was stopped, any time
                self._until = began + waited + min(waited, _LONGEST_S)
            raise


_KEY = re.compile(r"(?!.{513})[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*", re.ASCII)


def is_key(name: str) -> bool:
    """Whether a value may be written under a name."""
    return _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return a key as it is; anything else raises ValueError."""
    if not is_key(key):
        raise ValueError(f"{key!r} is no key: names of letters, digits and -_. joined by /")
    return key


def length_of(parts: Sequence[Bytes]) -> int:
    """Return the bytes of a value that is to be written."""
    return sum(memoryview(part).nbytes for part in parts)
