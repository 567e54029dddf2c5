"""A dictionary: the simplest backend, and what the others are compared with."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

from ragkv.errors import StoreError
from ragkv.store.backends.base import Backend, Bytes, Key, check_key


class MemoryBackend(Backend):
    """Keeps values in this process.

    Parameters
    ----------
    place
        What several backends share to see each other's values; None for a place of its own.
    """

    def __init__(self, place: Place | None = None) -> None:
        self.place = Place() if place is None else place
        self._closed = False

    def get(self, key: str) -> bytes | None:
        """Return the value itself."""
        return self._open().values.get(key)

    def size(self, key: str) -> int | None:
        """Return the value's length."""
        value = self.get(key)
        return None if value is None else len(value)

    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        """Keep a copy of the parts."""
        self._put(key, parts, absent=False)

    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        """Keep a copy of the parts unless there is a value."""
        return self._put(key, parts, absent=True)

    def delete(self, key: str) -> bool:
        """Let a value go."""
        place = self._open()
        with place.lock:
            if place.values.pop(key, None) is None:
                return False
            del place.keys[bisect_left(place.keys, key)]
            return True

    def scan(self, prefix: str, after: str = "") -> Iterator[Key]:
        """Yield what is there at the time of the call."""
        place = self._open()
        with place.lock:
            first = max(bisect_left(place.keys, prefix), bisect_right(place.keys, after))
            last = bisect_left(place.keys, prefix + "\x7f")
            return iter([Key(key, len(place.values[key])) for key in place.keys[first:last]])

    def close(self) -> None:
        """Let go of the place."""
        self._closed = True

    def _put(self, key: str, parts: Sequence[Bytes], *, absent: bool) -> bool:
        place = self._open()
        value = b"".join(parts)
        with place.lock:
            known = check_key(key) in place.values
            if known and absent:
                return False
            if not known:
                insort(place.keys, key)
            place.values[key] = value
            return True

    def _open(self) -> Place:
        if self._closed:
            raise StoreError("the store in memory is closed")
        return self.place


class Place:
    """Values, and their keys in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self.keys: list[str] = []
