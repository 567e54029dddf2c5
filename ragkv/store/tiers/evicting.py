"""A bounded store that evicts chunks for new ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.errors import StoreError, StoreFullError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import Found, Store, Terms
from ragkv.store.entry.format import encode
from ragkv.store.over import StoreOver
from ragkv.store.tiers.policies import make_policy

_PATIENCE = 4
_REMEMBERED = 1 << 16


class EvictingStore(StoreOver):
    """Deletes chunks of a store that raises StoreFullError at its limit.

    A chunk is evicted with all its entries, in memory, too, and finders drop it like a deleted
    one. Other processes' puts are known here, their uses are not; what ``keep_only`` deletes is
    noticed when room is made.

    Parameters
    ----------
    below
        Any store. Closed together with this one.
    budget
        The store's limit in bytes: nothing is evicted for a larger entry.
    policy, costs
        As for :class:`ragkv.store.tiers.memory.MemoryStore`. A chunk's size is its tokens.
    """

    def __init__(
        self,
        below: Store,
        budget: float,
        *,
        policy: str = "lru",
        costs: Callable[[int, int], float] | None = None,
    ) -> None:
        super().__init__(below)
        self.budget = budget
        self._costs = costs
        self._policy = make_policy(policy)
        self._lock = threading.Lock()
        self._making_room = threading.Lock()
        self._evicted: dict[str, None] = {}
        self._seen = 0
        self._written = 0
        self._per_token: float | None = None

    def get(self, text: str, fingerprint: Fingerprint) -> Found[ChunkKV]:
        """Return the entry, and count a hit as a use."""
        found = self.below.get(text, fingerprint)
        if found.entry is not None:
            self._enter(text, len(found.entry), used=True)
        return found

    def open(self, text: str, fingerprint: Fingerprint) -> Found[LayeredKV]:
        """Return the lazy entry, and count a hit as a use."""
        found = self.below.open(text, fingerprint)
        if found.entry is not None:
            self._enter(text, len(found.entry.token_ids), used=True)
        return found

    def put(self, entry: ChunkKV, fingerprint: Fingerprint, terms: Terms = Terms()) -> int:
        """Write an entry; while there is no room for it, evict the chunk of least worth.

        At most about four times the entry's tokens are evicted, more only where another put
        here took the room: if the entry still does not fit, other processes take the room, and
        emptying this store would not help.
        """

        def write() -> int:
            nbytes = self.below.put(entry, fingerprint, terms)
            with self._lock:
                self._written += 1
            return nbytes

        nbytes = None
        if not self._making_room.locked():  # or it would take the room that another put makes
            with suppress(StoreFullError):
                nbytes = write()
        if nbytes is None:
            with self._making_room:
                nbytes = self._make_room(entry, encode(entry, fingerprint).nbytes, write)
        if nbytes:
            self._per_token = nbytes / len(entry)
            self._enter(entry.text, len(entry))
        return nbytes

    def delete(self, text: str) -> int:
        """Remove the chunk's entries."""
        with self._lock:
            self._policy.remove(text)
        return self.below.delete(text)

    def was_evicted(self, text: str) -> bool:
        """Whether it was evicted here, and is not stored."""
        with self._lock:
            return text in self._evicted and text not in self._policy

    def _make_room(self, entry: ChunkKV, nbytes: int, write: Callable[[], int]) -> int:
        self._learn(self._per_token or nbytes / len(entry))
        freed, written = 0, self._written
        while True:
            try:
                return write()
            except StoreFullError:
                if self._written != written:
                    freed, written = 0, self._written
                if nbytes > self.budget or freed > _PATIENCE * len(entry):
                    raise
                victim, tokens = self._evict(entry.text)
                if victim is None:
                    raise
            if self.below.delete(victim):
                freed += tokens

    def _evict(self, spared: str) -> tuple[str | None, int]:
        """Evict the next text, other than the one that needs the room.

        Returns
        -------
        tuple
            The text, None if there is none, and its number of tokens.
        """
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

    def _learn(self, per_token: float) -> None:
        """Add the chunks that other processes put, and drop deleted ones."""
        texts: list[str] = []
        with suppress(StoreError):  # then with what is known already
            self._seen, texts, _ = self.below.changes(self._seen)
        with self._lock:
            if all(text in self._policy for text in texts):
                return
        sizes: dict[str, int] = {}
        for info in self.below.entries():
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
