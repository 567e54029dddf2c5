"""Eviction of chunks from a store with a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError, StoreFullError
from ragkv.store.tiers.pgdsf import PGDSF

if TYPE_CHECKING:
    from ragkv.store.chunk_store import ChunkStore

_PATIENCE = 4
_REMEMBERED = 1 << 16


class Eviction:
    """Deletes chunks of a store that raises StoreFullError at its limit.

    A chunk is evicted with all its entries, also those in tiers, and finders drop it like a
    deleted one. Chunks that other processes put are known here; their uses are not. Deletions by
    ``keep_only`` are noticed at the next eviction.

    Parameters
    ----------
    budget
        The store's limit in bytes: nothing is evicted for a larger entry.
    costs
        As for :class:`ragkv.store.tiers.tier.MemoryTier`. A chunk's size is its number of tokens.
    """

    def __init__(self, budget: float, costs: Callable[[int, int], float] | None = None) -> None:
        self.budget = budget
        self._costs = costs
        self._policy = PGDSF()
        self._lock = threading.Lock()
        self._making_room = threading.Lock()
        self._evicted: dict[str, None] = {}
        self._seen = 0
        self._written = 0
        self._per_token: float | None = None

    def use(self, text: str, tokens: int) -> None:
        """Count a hit of a stored chunk."""
        self._enter(text, tokens, used=True)

    def remove(self, text: str) -> None:
        """Forget a chunk that is deleted."""
        with self._lock:
            self._policy.remove(text)

    def was_evicted(self, text: str) -> bool:
        """Whether this process evicted the chunk, and it is not stored again."""
        with self._lock:
            return text in self._evicted and text not in self._policy

    def write(
        self, store: ChunkStore, entry: ChunkKV, nbytes: int, write: Callable[[], int]
    ) -> int:
        """Write an entry of ``nbytes``; while there is no room, evict the chunk of least value.

        Beyond a limit that was lowered, at most about four times the entry's tokens are evicted,
        unless another put of this process took the room. If the entry still does not fit, other
        processes take the room, and evicting more would not help.
        """

        def counted() -> int:
            written = write()
            with self._lock:
                self._written += 1
            return written

        written = None
        if not self._making_room.locked():  # else it would take another put's room
            with suppress(StoreFullError):
                written = counted()
        if written is None:
            with self._making_room:
                written = self._make_room(store, entry, nbytes, counted)
        self._per_token = nbytes / len(entry)
        self._enter(entry.text, len(entry))
        return written

    def _make_room(
        self, store: ChunkStore, entry: ChunkKV, nbytes: int, write: Callable[[], int]
    ) -> int:
        per_token = self._per_token or nbytes / len(entry)
        self._learn(store, per_token)
        with self._lock:
            excess = max(0.0, self._policy.nbytes - self.budget / per_token)
        freed, written = 0, self._written
        while True:
            try:
                return write()
            except StoreFullError:
                if self._written != written:
                    freed, written = 0, self._written
                if nbytes > self.budget or freed > excess + _PATIENCE * len(entry):
                    raise
                victim, tokens = self._evict(entry.text)
                if victim is None:
                    raise
            if store.delete(victim):
                freed += tokens

    def _evict(self, spared: str) -> tuple[str | None, int]:
        """Evict the next text except ``spared``; return it, or None, and its tokens."""
        with self._lock:
            victims = self._policy.victims(self._policy.size(spared) + 1)
            victim = next((str(text) for text in victims if text != spared), None)
            if victim is None:
                return None, 0
            tokens = self._policy.size(victim)
            self._policy.evict(victim)
            self._evicted[victim] = None
            if len(self._evicted) > _REMEMBERED:
                del self._evicted[next(iter(self._evicted))]
            return victim, tokens

    def _learn(self, store: ChunkStore, per_token: float) -> None:
        """Add chunks that other processes put, and drop deleted ones."""
        texts: list[str] = []
        with suppress(StoreError):  # else the known chunks have to suffice
            self._seen, texts, _ = store.changes(self._seen)
        with self._lock:
            if all(text in self._policy for text in texts):
                return
        sizes: dict[str, int] = {}
        for info in store.entries():
            sizes[info.text] = sizes.get(info.text, 0) + info.nbytes
        with self._lock:
            for text in self._policy:
                if text not in sizes:
                    self._policy.remove(text)
        for text, nbytes in sizes.items():
            self._enter(text, max(1, round(nbytes / per_token)))

    def _enter(self, text: str, tokens: int, *, used: bool = False) -> None:
        """Add a stored text to the policy, or count its use."""
        with self._lock:
            if text not in self._policy:
                cost = float(tokens) if self._costs is None else self._costs(0, tokens)
                self._policy.insert(text, tokens, cost, tokens)
            elif used:
                self._policy.hit(text)
