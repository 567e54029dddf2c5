"""Memory, and a device's memory, over a slower store that several processes share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.pool import Pool
from ragkv.store.base import Changes, Found, Store, Terms, TierUse
from ragkv.store.entry.codecs import codec_of
from ragkv.store.entry.lazy import LazyKV
from ragkv.store.over import StoreOver
from ragkv.store.tiers.memory import MemoryStore
from ragkv.store.tiers.rates import Rate

_log = logging.getLogger(__name__)


class TieredStore(StoreOver):
    """Serves entries from its tiers; the store below decides what exists.

    Parameters
    ----------
    memory
        The host's tier, filled by ``get``, ``open`` and ``put`` within its own budget.
    below
        The store behind it, such as a disk's, whose entries own their memory. Closed
        together with this one.
    device
        A tier before ``memory``, on the model's device. New entries go there; an evicted one is
        copied to ``memory`` unless that has it already: it is swapped out only once (RAGCache,
        section 5.1).

    Notes
    -----
    The tiers drop what another process deletes below with the next call of ``changes``, which
    engines make for every prompt.

    Tiers that copy their entries (on a device, or in pinned memory) are filled in a thread,
    after the request that loaded them. At most a quarter of the largest tier's budget waits for
    that; other entries are loaded again the next time.
    """

    def __init__(
        self, memory: MemoryStore, below: Store, *, device: MemoryStore | None = None
    ) -> None:
        super().__init__(below)
        self.memory = memory
        self.tiers: Sequence[MemoryStore] = [memory] if device is None else [device, memory]
        self.load_rate = Rate()
        """Bytes of KV a second that ``below`` delivers, decoded, as measured."""
        self._copying: Pool | None = None
        if any(tier.copies for tier in self.tiers):
            self._copying = Pool(1, "ragkv-tier")
        self._waiting = 0  # bytes
        self._below_hits = 0
        self._largest = max(tier.budget for tier in self.tiers)
        self._keeping = threading.Lock()
        self._lock = threading.Lock()
        self._loading: dict[tuple[str, Fingerprint], Future[Found[ChunkKV]]] = {}
        self._deletions = 0
        self._following = threading.Lock()
        self._seen = 0

    def get(self, text: str, fingerprint: Fingerprint) -> Found[ChunkKV]:
        """Return the entry from a tier, or load it once for all threads that request it."""
        found = self._in_tiers(text, fingerprint)
        if found is not None:
            return found
        key, mine = (text, fingerprint), Future[Found[ChunkKV]]()
        running = mine
        try:  # an interrupt may come anywhere
            running = self._loading.setdefault(key, mine)
            if running is not mine and not running.done():  # a prefetch, most often
                return running.result()
            found = self._load(text, fingerprint)
            mine.set_result(found)
        except BaseException as error:
            if not mine.done():
                mine.set_exception(error)
            raise
        finally:
            if running.done() and self._loading.get(key) is running:
                self._loading.pop(key, None)
        return found

    def open(self, text: str, fingerprint: Fingerprint) -> Found[LayeredKV]:
        """Return the entry from a tier, or a lazy one from below; once loaded, tiers get it."""
        found = self._in_tiers(text, fingerprint)
        if found is None:
            running = self._loading.get((text, fingerprint))
            found = None if running is None or running.done() else running.result()
        if found is not None:
            return found
        deletions = self._deletions
        began = time.perf_counter()
        opened = self.below.open(text, fingerprint)
        opening, expires_at = time.perf_counter() - began, opened.expires_at

        def keep(
            entry: LayeredKV, seconds: float
        ) -> None:  # no reference back: the entry refers to it
            self.load_rate.add(entry.nbytes, opening + seconds)
            self._offer(entry, fingerprint, expires_at, deletions)

        self._count(opened)
        if isinstance(opened.entry, LazyKV):
            opened.entry.on_loaded(keep)
        elif opened.entry is not None:
            keep(opened.entry, 0.0)
        return opened

    def _in_tiers(self, text: str, fingerprint: Fingerprint) -> Found[ChunkKV] | None:
        """Return a tier's entry; one of a later tier is offered to those before."""
        deletions = self._deletions
        for level, tier in enumerate(self.tiers):
            found = tier.get(text, fingerprint)
            if found.entry is not None:
                if level:
                    self._offer(found.entry, fingerprint, found.expires_at, deletions)
                for lower in self.tiers[level + 1 :]:
                    lower.count_request(text, fingerprint)
                return found
        return None

    def put(self, entry: ChunkKV, fingerprint: Fingerprint, terms: Terms = Terms()) -> int:
        """Write through: below first.

        An entry of a lossy codec is not kept here as it was before: every reader gets the same.
        """
        deletions, expires_at = self._deletions, terms.expires_at
        nbytes = self.below.put(entry, fingerprint, terms)
        if expires_at == Terms.KEEP:
            expires_at = self.below.expiry(entry.text)
        for tier in self.tiers:
            tier.drop(entry.text, fingerprint)
        if nbytes and codec_of(fingerprint.codec).lossless:
            self._fill(entry, fingerprint, expires_at, deletions)
        return nbytes

    def retain(self, text: str, fingerprint: Fingerprint, terms: Terms) -> bool:
        """Apply the terms below, and their time in the tiers."""
        stored = self.below.retain(text, fingerprint, terms)
        for tier in self.tiers if stored else ():
            tier.retain(text, fingerprint, Terms(expires_at=terms.expires_at))
        return stored

    def delete(self, text: str) -> int:
        """Delete the chunk's entries in all tiers."""
        try:
            return self.below.delete(text)
        finally:
            self._forget([text])

    def keep_only(self, document: str, texts: Iterable[str], revision: str | None = None) -> int:
        """Let the store below decide; the tiers drop what it deleted."""
        try:
            return super().keep_only(document, texts, revision)
        finally:
            with suppress(StoreError):  # retried with the next prompt
                self.changes(self._seen)

    def changes(self, since: int) -> Changes:
        """Return the changes of the store below; the tiers drop what was deleted there."""
        with self._following:
            found = self.below.changes(since)
            if found.newest < self._seen:  # the place was emptied, and is another one now
                self._forget({text for tier in self.tiers for text in tier.texts()})
            elif found.newest > self._seen:
                own = found if since == self._seen else self.below.changes(self._seen)
                self._forget(own.removed)
            self._seen = found.newest
        return found

    def tiers_in_use(self) -> tuple[TierUse, ...]:
        """Return the tiers, and the hits of the store below, whose bytes nobody counts."""
        own = [use for tier in self.tiers for use in tier.tiers_in_use()]
        return (*own, TierUse("below", None, self._below_hits))

    def make_room(self) -> bool:
        """Empty the tier on the device, where there is one."""
        tier = self.tiers[0]
        with self._keeping:
            texts = [] if tier.device.type == "cpu" else list(tier.texts())
            return sum(tier.delete(text) for text in texts) > 0

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """Return 0 for an entry in a tier, otherwise an estimate by the recent loading speed."""
        if any(tier.contains(text, fingerprint) for tier in self.tiers):
            return 0.0
        known = super().load_seconds(text, fingerprint, nbytes)
        return self.load_rate.seconds(nbytes) if known is None else known

    def close(self) -> None:
        """Close all tiers."""
        if self._copying is not None:
            self._copying.shutdown()
        for tier in self.tiers:
            tier.close()
        super().close()

    def _load(self, text: str, fingerprint: Fingerprint) -> Found[ChunkKV]:
        deletions = self._deletions
        started = time.perf_counter()
        found = self.below.get(text, fingerprint)
        self._count(found)
        if found.entry is not None:
            self.load_rate.add(found.entry.nbytes, time.perf_counter() - started)
            self._offer(found.entry, fingerprint, found.expires_at, deletions)
        return found

    def _count(self, found: Found[Any]) -> None:
        with self._lock:
            self._below_hits += found.entry is not None

    def _offer(self, entry: LayeredKV, *known: Any) -> None:
        """Fill the tiers, in a thread where that copies."""
        if entry.nbytes > self._largest:
            return
        if self._copying is None:
            self._fill(entry.whole(), *known)
            return
        with self._lock:
            if self._waiting and self._waiting + entry.nbytes > self._largest // 4:
                return
            self._waiting += entry.nbytes

        def fill() -> None:
            try:
                self._fill(entry.whole(), *known)
            except Exception:  # noqa: BLE001  the entry is still below
                _log.exception("a chunk was not kept in memory")
            finally:
                with self._lock:
                    self._waiting -= entry.nbytes

        self._copying.submit(fill)

    def _fill(
        self, entry: ChunkKV, fingerprint: Fingerprint, expires_at: float | None, deletions: int
    ) -> None:
        """Keep an entry in the tiers, unless anything was deleted since ``deletions``."""
        with self._keeping:
            if self._deletions == deletions:
                self._keep(0, entry, fingerprint, expires_at)

    def _keep(
        self, level: int, entry: ChunkKV, fingerprint: Fingerprint, expires_at: float | None
    ) -> None:
        """Offer an entry to a tier, and what it evicts to the next one."""
        if level == len(self.tiers) or self.tiers[level].contains(entry.text, fingerprint):
            return
        evicted = self.tiers[level].put_evicting(entry, fingerprint, Terms(expires_at=expires_at))
        if evicted is None:
            self._keep(level + 1, entry, fingerprint, expires_at)
        for each in evicted or ():
            self._keep(level + 1, *each)

    def _forget(self, texts: Iterable[str]) -> None:
        with self._keeping:
            for text in texts:
                self._deletions += 1
                for tier in self.tiers:
                    tier.delete(text)
