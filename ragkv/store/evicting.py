"""A bounded store that makes room by itself: what is worth least leaves for what is new."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreFullError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import EntryInfo, Lookup, Store
from ragkv.store.policies import make_policy

_PATIENCE = 4


class EvictingStore(Store):
    """Stands over a store that raises StoreFullError at its limit, and deletes chunks there.

    A chunk leaves with all its entries, in memory, too, and is forgotten by finders as if
    it had been deleted. What other processes use is not known here, only what they put.

    Parameters
    ----------
    store
        Any store. Closed together with this one.
    budget
        The store's limit in bytes: nothing leaves for an entry that is larger than that.
    policy, costs
        As for :class:`ragkv.store.memory.MemoryStore`. A chunk's size is its tokens.
    """

    def __init__(
        self,
        store: Store,
        budget: float,
        *,
        policy: str = "lru",
        costs: Callable[[int, int], float] | None = None,
    ) -> None:
        self.store = store
        self.budget = budget
        self._costs = costs
        self._policy = make_policy(policy)
        self._lock = threading.Lock()
        self._making_room = threading.Lock()
        self._seen = 0
        self._per_token: float | None = None

    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Return the entry, and count a hit as a use."""
        lookup = self.store.get(text, fingerprint)
        if lookup.entry is not None:
            self._enter(text, len(lookup.entry), used=True)
        return lookup

    def put(
        self,
        entry: ChunkKV,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> int:
        """Write an entry; while there is no room for it, the chunk worth least leaves.

        At most about four times the entry's tokens leave: if it still does not fit, others
        take the room, and emptying this store would not help.
        """

        def write() -> int:
            return self.store.put(entry, fingerprint, document=document, expires_at=expires_at)

        try:
            nbytes = write()
        except StoreFullError:
            if entry.nbytes > self.budget:
                raise
            with self._making_room:
                nbytes = self._make_room(entry, write)
        if nbytes:
            self._per_token = nbytes / len(entry)
            self._enter(entry.text, len(entry))
        return nbytes

    def hold(
        self,
        text: str,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> bool:
        """Hold the chunk in the store."""
        return self.store.hold(text, fingerprint, document=document, expires_at=expires_at)

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the entry is there."""
        return self.store.contains(text, fingerprint)

    def delete(self, text: str) -> int:
        """Remove the chunk's entries."""
        with self._lock:
            self._policy.remove(text)
        return self.store.delete(text)

    def keep_only(self, document: str, texts: Iterable[str]) -> int:
        """Let the store decide. What it removed is found out when room is made."""
        return self.store.keep_only(document, texts)

    def entries(self) -> Iterator[EntryInfo]:
        """Entries of the store."""
        return self.store.entries()

    def gc(self) -> int:
        """Remove what has expired."""
        return self.store.gc()

    def changes(self, since: int) -> tuple[int, list[str]]:
        """Return the changes of the store."""
        return self.store.changes(since)

    def deletions(self, since: int) -> list[str]:
        """Return the deletions of the store, those that made room included."""
        return self.store.deletions(since)

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """Return what the store says."""
        return self.store.load_seconds(text, fingerprint, nbytes)

    def texts(self) -> Iterator[str]:
        """Texts of the store."""
        return self.store.texts()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def _make_room(self, entry: ChunkKV, write: Callable[[], int]) -> int:
        self._learn(entry)
        freed = 0
        while True:
            try:
                return write()
            except StoreFullError:
                victim = self._victim(entry.text)
                if victim is None or freed > _PATIENCE * len(entry):
                    raise
            with self._lock:
                tokens = self._policy.size(victim)
                self._policy.evict(victim)
            if self.store.delete(victim):
                freed += tokens

    def _victim(self, spared: str) -> str | None:
        """Return the text that leaves next, other than the one that room is made for."""
        with self._lock:
            victims = self._policy.victims(self._policy.size(spared) + 1)
            return next((str(text) for text in victims if text != spared), None)

    def _learn(self, like: ChunkKV) -> None:
        """Enter what is there and was not put here, and forget what is gone."""
        self._seen, texts = self.store.changes(self._seen)
        with self._lock:
            if all(text in self._policy for text in texts):
                return
        sizes: dict[str, int] = {}
        for info in self.store.entries():
            sizes[info.text] = sizes.get(info.text, 0) + info.nbytes
        with self._lock:
            for text in self._policy:
                if text not in sizes:
                    self._policy.remove(text)
        per_token = self._per_token or like.nbytes / len(like)
        for text, nbytes in sizes.items():
            self._enter(text, max(1, round(nbytes / per_token)))

    def _enter(self, text: str, tokens: int, *, used: bool = False) -> None:
        """Note a text that is stored; count a use of one that was noted already."""
        with self._lock:
            if text not in self._policy:
                seconds = float(tokens) if self._costs is None else self._costs(0, tokens)
                self._policy.insert(text, tokens, seconds, tokens)
            elif used:
                self._policy.hit(text)
