"""A bounded store that makes room by itself: what is worth least leaves for what is new."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError, StoreFullError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import Lookup, Opened, Store
from ragkv.store.entry.format import encode
from ragkv.store.tiers.over import StoreOver
from ragkv.store.tiers.policies import make_policy

_PATIENCE = 4


class EvictingStore(StoreOver):
    """Stands over a store that raises StoreFullError at its limit, and deletes chunks there.

    A chunk leaves with all its entries, in memory, too, and is forgotten by finders as if
    it had been deleted. What other processes use is not known here, only what they put; what
    ``keep_only`` removes is found out when room is made.

    Parameters
    ----------
    below
        Any store. Closed together with this one.
    budget
        The store's limit in bytes: nothing leaves for an entry that is larger than that.
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
        self._seen = 0
        self._written = 0
        self._per_token: float | None = None

    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Return the entry, and count a hit as a use."""
        lookup = self.below.get(text, fingerprint)
        if lookup.entry is not None:
            self._enter(text, len(lookup.entry), used=True)
        return lookup

    def open(self, text: str, fingerprint: Fingerprint) -> Opened:
        """Return the entry as it arrives, and count a hit as a use."""
        opened = self.below.open(text, fingerprint)
        if opened.entry is not None:
            self._enter(text, len(opened.entry.token_ids), used=True)
        return opened

    def put(
        self,
        entry: ChunkKV,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> int:
        """Write an entry; while there is no room for it, the chunk worth least leaves.

        At most about four times the entry's tokens leave, more only where a put that was
        under way here took the room: if it still does not fit, other processes take it, and
        emptying this store would not help.
        """

        def write() -> int:
            nbytes = self.below.put(entry, fingerprint, document=document, expires_at=expires_at)
            with self._lock:
                self._written += 1
            return nbytes

        nbytes = None
        if not self._making_room.locked():  # or this would take the room that another makes
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
        """Let the text go that leaves next, other than the one that room is made for.

        Returns
        -------
        tuple
            The text, None if there is none, and its tokens.
        """
        with self._lock:
            victims = self._policy.victims(self._policy.size(spared) + 1)
            victim = next((str(text) for text in victims if text != spared), None)
            if victim is None:
                return None, 0
            tokens = self._policy.size(victim)
            self._policy.evict(victim)
            return victim, tokens

    def _learn(self, per_token: float) -> None:
        """Enter what is there and was not put here, and forget what is gone."""
        texts: list[str] = []
        with suppress(StoreError):  # then by what was known before
            self._seen, texts = self.below.changes(self._seen)
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
        """Note a text that is stored; count a use of one that was noted already."""
        with self._lock:
            if text not in self._policy:
                seconds = float(tokens) if self._costs is None else self._costs(0, tokens)
                self._policy.insert(text, tokens, seconds, tokens)
            elif used:
                self._policy.hit(text)
