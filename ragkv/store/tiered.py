"""Memory over a slower store that several processes share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import Lookup, Store
from ragkv.store.memory import MemoryStore


class TieredStore(Store):
    """Serves from ``memory`` what it holds; ``below`` decides what exists.

    Parameters
    ----------
    memory
        The fast tier. Filled by ``get`` and ``put``, emptied by its own budget.
    below
        The store behind it, such as a :class:`DiskStore`, whose entries own their
        memory (``mapped=False``). Closed together with this one.

    Notes
    -----
    What another process deletes below stays in this process's memory until it leaves
    there by the budget.
    """

    def __init__(self, memory: MemoryStore, below: Store) -> None:
        self.memory = memory
        self.below = below
        self._lock = threading.Lock()
        self._loading: dict[tuple[str, Fingerprint], Future[Lookup]] = {}
        self._deletions = 0

    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Return the entry from memory, or load it once however many threads ask for it."""
        lookup = self.memory.get(text, fingerprint)
        if lookup.entry is not None:
            return lookup
        key = (text, fingerprint)
        with self._lock:
            running = self._loading.get(key)
            if running is None:
                mine = self._loading[key] = Future()
        if running is not None:  # a prefetch, most often
            return running.result()
        try:
            lookup = self._load(text, fingerprint)
            mine.set_result(lookup)
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._loading[key]
        return lookup

    def put(self, entry: ChunkKV, fingerprint: Fingerprint) -> int:
        """Write through: below first."""
        deletions = self._deletions
        nbytes = self.below.put(entry, fingerprint)
        self._fill(entry, fingerprint, deletions)
        return nbytes

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the entry is below."""
        return self.below.contains(text, fingerprint)

    def delete(self, text: str) -> int:
        """Remove the chunk's entries from both tiers."""
        try:
            return self.below.delete(text)
        finally:
            with self._lock:
                self._deletions += 1
                self.memory.delete(text)

    def changes(self, since: int) -> tuple[int, list[str]]:
        """Return the changes of the store below."""
        return self.below.changes(since)

    def texts(self) -> Iterator[str]:
        """Texts of the store below."""
        return self.below.texts()

    def close(self) -> None:
        """Close both tiers."""
        self.memory.close()
        self.below.close()

    def _load(self, text: str, fingerprint: Fingerprint) -> Lookup:
        deletions = self._deletions
        lookup = self.below.get(text, fingerprint)
        if lookup.entry is not None:
            self._fill(lookup.entry, fingerprint, deletions)
        return lookup

    def _fill(self, entry: ChunkKV, fingerprint: Fingerprint, deletions: int) -> None:
        """Keep an entry in memory, unless something was deleted since ``deletions``."""
        with self._lock:
            if self._deletions == deletions:
                self.memory.put(entry, fingerprint)
