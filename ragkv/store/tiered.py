"""A store with copies of its entries in memory, and in a device's memory."""

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
from ragkv.store.backends.backend import Backend, Bytes
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.entry.codecs import codec_of
from ragkv.store.entry.lazy import LazyKV
from ragkv.store.tiers.eviction import Eviction
from ragkv.store.tiers.tier import MemoryTier
from ragkv.store.types import Changes, Found, Terms, TierUse

_log = logging.getLogger(__name__)
_DECAY = 0.8
"""Factor of earlier samples of a rate at each new one."""
_LEAST_SAMPLES = 3
_SLOWER_BY = 1.25
"""Least ratio of the times at which computing replaces loading."""
LEAST_TOKENS = 64
"""Fewest tokens of a pass whose time is counted: shorter ones are mostly overhead."""


class Rate:
    """An amount per second, as an exponential average. Threads can share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amount = self._seconds = 0.0
        self._samples = 0

    def add(self, amount: float, seconds: float) -> None:
        """Add a sample."""
        with self._lock:
            self._amount = _DECAY * self._amount + amount
            self._seconds = _DECAY * self._seconds + seconds
            self._samples += 1

    def seconds(self, amount: float) -> float | None:
        """Return the seconds for an amount; None before the third sample."""
        with self._lock:
            if self._samples < _LEAST_SAMPLES or self._amount <= 0:
                return None
            return amount * self._seconds / self._amount


def is_slower(load_seconds: float | None, compute_seconds: float | None) -> bool:
    """Whether loading is slower than computing by more than a quarter.

    False where either has not been measured: then the entry is loaded.
    """
    if load_seconds is None or compute_seconds is None:
        return False
    return load_seconds > _SLOWER_BY * compute_seconds


class TieredStore(ChunkStore):
    """Serves entries from its tiers; the backend decides what exists.

    Parameters
    ----------
    tiers
        The fastest first: on the model's device, in the host's memory; perhaps none. New entries
        go to the first; an evicted one is copied to the next unless it is there already
        (RAGCache, section 5.1).
    backend, namespace, read_only, eviction
        As for :class:`ragkv.store.chunk_store.ChunkStore`.

    Notes
    -----
    The tiers drop the deletions of other processes with the next call of ``changes``, which engines
    make for every prompt.

    A thread fills tiers that copy their entries (on a device, or in pinned memory), after the
    request that loaded them. At most a quarter of the largest tier's budget waits in its queue;
    other entries are loaded again the next time.
    """

    def __init__(
        self,
        backend: Backend,
        namespace: str = "default",
        *,
        tiers: Sequence[MemoryTier] = (),
        read_only: bool = False,
        eviction: Eviction | None = None,
    ) -> None:
        self.tiers = tiers
        self._largest = max((tier.budget for tier in tiers), default=0)
        mapped = not self._largest  # tiers keep entries, which then own their memory
        super().__init__(backend, namespace, read_only=read_only, mapped=mapped, eviction=eviction)
        self.load_rate = Rate()
        """Measured bytes of decoded KV per second from the backend."""
        copies = any(tier.copies for tier in tiers)
        self._copying = Pool(1, "ragkv-tier") if copies else None
        self._waiting = 0  # bytes
        self._keeping = threading.Lock()
        self._lock = threading.Lock()
        self._loading: dict[tuple[str, Fingerprint], Future[Found[ChunkKV]]] = {}
        self._deletions = 0
        self._following = threading.Lock()
        self._followed = 0

    def get(self, text: str, fingerprint: Fingerprint) -> Found[ChunkKV]:
        """Return the entry from a tier, or load it once for all threads that request it."""
        found = self._in_tiers(text, fingerprint)
        if found is not None:
            return found
        key, mine = (text, fingerprint), Future[Found[ChunkKV]]()
        running = mine
        try:  # an interrupt can come anywhere
            running = self._loading.setdefault(key, mine)
            if running is not mine and not running.done():  # usually a prefetch
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
        """Return the entry from a tier, or a lazy one, which is added to the tiers once loaded."""
        found = self._in_tiers(text, fingerprint)
        if found is None:
            running = self._loading.get((text, fingerprint))
            found = None if running is None or running.done() else running.result()
        if found is not None:
            return found
        deletions = self._deletions
        began = time.perf_counter()
        opened = super().open(text, fingerprint)
        opening, expires_at = time.perf_counter() - began, opened.expires_at

        def keep(entry: LayeredKV, seconds: float) -> None:  # `opened` would be a circle
            self.load_rate.add(entry.nbytes, opening + seconds)
            self._offer(entry, fingerprint, expires_at, deletions)

        if isinstance(opened.entry, LazyKV):
            opened.entry.on_loaded(keep)
        elif opened.entry is not None:
            keep(opened.entry, 0.0)
        return opened

    def _in_tiers(self, text: str, fingerprint: Fingerprint) -> Found[ChunkKV] | None:
        """Return a tier's entry; offer one of a later tier to those before."""
        deletions = self._deletions
        for level, tier in enumerate(self.tiers):
            kept = tier.get(text, fingerprint)
            if kept is not None:
                if level:
                    self._offer(*kept, deletions)
                for lower in self.tiers[level + 1 :]:
                    lower.count_request(text, fingerprint)
                self._count_use(text, len(kept.entry))
                return Found(kept.entry, expires_at=kept.expires_at)
        return None

    def _write(
        self, entry: ChunkKV, fingerprint: Fingerprint, parts: Sequence[Bytes], terms: Terms
    ) -> int:
        """Write to the backend, then to the tiers.

        With a lossy codec only decoded entries are kept in tiers: every reader gets the same.
        """
        deletions, expires_at = self._deletions, terms.expires_at
        nbytes = super()._write(entry, fingerprint, parts, terms)
        if expires_at == Terms.KEEP:
            expires_at = self.expiry(entry.text)
        for tier in self.tiers:
            tier.drop(entry.text, fingerprint)
        if codec_of(fingerprint.codec).lossless:
            self._fill(entry, fingerprint, expires_at, deletions)
        return nbytes

    def retain(self, text: str, fingerprint: Fingerprint, terms: Terms) -> bool:
        """Apply the terms, in the tiers too."""
        stored = super().retain(text, fingerprint, terms)
        for tier in self.tiers if stored else ():
            tier.extend(text, terms.expires_at)
        return stored

    def delete(self, text: str) -> int:
        """Delete the chunk's entries, in all tiers too."""
        try:
            return super().delete(text)
        finally:
            self._forget([text])

    def keep_only(self, document: str, texts: Iterable[str], revision: str | None = None) -> int:
        """Reduce the document's chunks, in the tiers too."""
        try:
            return super().keep_only(document, texts, revision)
        finally:
            with suppress(StoreError):  # retried with the next prompt
                self.changes(self._followed)

    def changes(self, since: int) -> Changes:
        """Return the changes; the tiers drop deleted chunks."""
        with self._following:
            found = super().changes(since)
            if found.newest < self._followed:  # the place was emptied
                self._forget({text for tier in self.tiers for text in tier.texts()})
            elif found.newest > self._followed:
                own = found if since == self._followed else super().changes(self._followed)
                self._forget(own.removed)
            self._followed = found.newest
        return found

    def tiers_in_use(self) -> tuple[TierUse, ...]:
        """Return the tiers, the fastest first, and the backend."""
        return (*(tier.in_use() for tier in self.tiers), *super().tiers_in_use())

    def make_room(self) -> bool:
        """Empty the tiers on the model's device; return whether they had entries."""
        with self._keeping:
            texts = [
                (tier, text)
                for tier in self.tiers
                if tier.device.type != "cpu"
                for text in tier.texts()
            ]
            return sum(tier.delete(text) for tier, text in texts) > 0

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """Return 0 for an entry in a tier, else an estimate from the loading rate."""
        if any(tier.contains(text, fingerprint) for tier in self.tiers):
            return 0.0
        known = super().load_seconds(text, fingerprint, nbytes)
        return self.load_rate.seconds(nbytes) if known is None else known

    def close(self) -> None:
        """Empty the tiers and close the backend."""
        if self._copying is not None:
            self._copying.shutdown()
        for tier in self.tiers:
            tier.clear()
        super().close()

    def _load(self, text: str, fingerprint: Fingerprint) -> Found[ChunkKV]:
        deletions = self._deletions
        started = time.perf_counter()
        found = super().open(text, fingerprint).load_all()
        if found.entry is not None:
            self.load_rate.add(found.entry.nbytes, time.perf_counter() - started)
            self._offer(found.entry, fingerprint, found.expires_at, deletions)
        return found

    def _offer(self, entry: LayeredKV, *known: Any) -> None:
        """Fill the tiers, in a thread if that copies."""
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
            except Exception:  # noqa: BLE001  the entry is still in the backend
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
        """Offer an entry to a tier, and the entries that it evicts to the next one."""
        if level == len(self.tiers) or self.tiers[level].contains(entry.text, fingerprint):
            return
        evicted = self.tiers[level].put(entry, fingerprint, expires_at)
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
