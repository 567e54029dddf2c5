"""A dictionary in this process."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

import torch

from ragkv.errors import StoreError, StoreFullError
from ragkv.model.workspace import pinned, pinned_bytes
from ragkv.store.backends.backend import Backend, Blob, Bytes, Key, check_key, length_of

ROW_BYTES = 4096
"""Values up to this length, a store's own rows, do not count towards the budget."""


class MemoryBackend(Backend):
    """Keeps values in this process.

    Parameters
    ----------
    place
        Values that several backends share; None for its own.
    budget
        Bytes of all large values; None for no limit.
    pin
        Keep large values in pinned memory, for asynchronous copies to a GPU.
    private
        No other backend changes the values: entries are not verified when they are read.
    """

    def __init__(
        self,
        place: Place | None = None,
        *,
        budget: int | None = None,
        pin: bool = False,
        private: bool = False,
    ) -> None:
        self.place = Place() if place is None else place
        self.budget = budget
        self.private = private
        self._pin = pin
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of all large values."""
        return self.place.nbytes

    def get(self, key: str) -> Blob | None:
        """Return the value itself if it is private, else a copy."""
        value = self._open().values.get(key)
        return value if self.private or value is None else bytearray(value)

    def size(self, key: str) -> int | None:
        """Return the value's length."""
        value = self._open().values.get(key)
        return None if value is None else len(value)

    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        """Keep a copy of the parts."""
        self._put(key, parts, absent=False)

    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        """Keep a copy of the parts unless there is a value."""
        return self._put(key, parts, absent=True)

    def check_room(self, key: str, nbytes: int) -> None:
        """Compare with the budget."""
        after = self.nbytes + self._taken(nbytes) - self._taken(self.size(key) or 0)
        if self.budget is not None and nbytes > ROW_BYTES and after > self.budget:
            raise StoreFullError(
                f"{after} bytes in memory would exceed the limit of {self.budget}: raise "
                "memory_bytes, or forget chunks"
            )

    def delete(self, key: str) -> bool:
        """Remove a value."""
        place = self._open()
        with place.lock:
            value = place.values.pop(key, None)
            if value is None:
                return False
            place.nbytes -= self._taken(len(value))
            del place.keys[bisect_left(place.keys, key)]
            return True

    def listed(self, prefix: str, after: str = "") -> Iterator[Key]:
        """Yield the keys at the time of the call."""
        place = self._open()
        with place.lock:
            first = max(bisect_left(place.keys, prefix), bisect_right(place.keys, after))
            last = bisect_left(place.keys, f"{prefix}\U0010ffff")
            return iter([Key(key, len(place.values[key])) for key in place.keys[first:last]])

    def close(self) -> None:
        """Drop the values; shared ones stay with the other backends."""
        self._closed = True
        self.place = Place()

    def _put(self, key: str, parts: Sequence[Bytes], *, absent: bool) -> bool:
        place = self._open()
        nbytes = length_of(parts)
        value = self._joined(parts, nbytes)
        with place.lock:
            known = place.values.get(check_key(key))
            if known is not None and absent:
                return False
            self.check_room(key, nbytes)
            if known is None:
                insort(place.keys, key)
            place.values[key] = value
            place.nbytes += self._taken(nbytes) - self._taken(len(known or b""))
            return True

    def _taken(self, nbytes: int) -> int:
        """Return the share of the budget that a value of this length takes."""
        if nbytes <= ROW_BYTES:
            return 0
        return pinned_bytes(nbytes) if self._pin else nbytes

    def _joined(self, parts: Sequence[Bytes], nbytes: int) -> Blob:
        pages = pinned((nbytes,), torch.uint8) if self._pin and nbytes > ROW_BYTES else None
        if pages is None:
            return bytearray().join(parts)
        value, at = pages.numpy().data, 0
        for part in parts:
            view = memoryview(part).cast("B")
            value[at : at + len(view)] = view
            at += len(view)
        return value

    def _open(self) -> Place:
        if self._closed:
            raise StoreError("the store in memory is closed")
        return self.place


class Place:
    """Values, their keys in order, and the bytes of the large ones."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, Blob] = {}
        self.keys: list[str] = []
        self.nbytes = 0
