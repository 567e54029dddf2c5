"""Memory, and a device's memory, over a slower store that several processes share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import KEPT, Lookup, Opened, Store
from ragkv.store.entry.codecs import codec_of
from ragkv.store.entry.lazy import LazyKV
from ragkv.store.tiers.memory import MemoryStore
from ragkv.store.tiers.over import StoreOver
from ragkv.store.tiers.rates import Rate

_log = logging.getLogger(__name__)


class TieredStore(StoreOver):
    """Serves from its tiers what they hold; ``below`` decides what exists.

    Parameters
    ----------
    memory
        The host's tier. Filled by ``get`` and ``put``, emptied by its own budget.
    below
        The store behind it, such as a disk's, whose entries own their memory. Closed
        together with this one.
    device
        A tier before ``memory``, on the model's device. New entries go there; one that
        leaves it is copied to ``memory`` only if that does not hold it, and stays there
        while it is wanted: it is swapped out only once (RAGCache, section 5.1).

    Notes
    -----
    What another process deletes below leaves the tiers with the next call of ``changes``,
    which engines make for every prompt.

    Tiers that copy what they keep (on a device, or in pinned memory) are filled in a thread,
    behind the request that loaded it. No more waits for that than a quarter of the largest
    tier's budget; the rest is loaded again the next time.
    """

    def __init__(
        self, memory: MemoryStore, below: Store, *, device: MemoryStore | None = None
    ) -> None:
        super().__init__(below)
        self.memory = memory
        self.tiers: Sequence[MemoryStore] = [memory] if device is None else [device, memory]
        self.load_rate = Rate()
        """Bytes of KV a second that ``below`` delivers, decoded, as measured."""
        self._copying: ThreadPoolExecutor | None = None
        if any(tier.copies for tier in self.tiers):
            self._copying = ThreadPoolExecutor(1, thread_name_prefix="ragkv-tier")
        self._waiting = 0  # bytes
        self._largest = max(tier.budget for tier in self.tiers)
        self._keeping = threading.Lock()
        self._lock = threading.Lock()
        self._loading: dict[tuple[str, Fingerprint], Future[Lookup]] = {}
        self._deletions = 0
        self._looking = threading.Lock()
        self._seen = 0

    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Return the entry from a tier, or load it once however many threads ask for it."""
        lookup = self._in_tiers(text, fingerprint)
        if lookup is not None:
            return lookup
        key, mine = (text, fingerprint), Future[Lookup]()
        running = mine
        try:  # an interrupt comes at any place
            running = self._loading.setdefault(key, mine)
            if running is not mine and not running.done():  # a prefetch, most often
                return running.result()
            lookup = self._load(text, fingerprint)
            mine.set_result(lookup)
        except BaseException as error:
            if not mine.done():
                mine.set_exception(error)
            raise
        finally:
            if running.done() and self._loading.get(key) is running:
                self._loading.pop(key, None)
        return lookup

    def open(self, text: str, fingerprint: Fingerprint) -> Opened:
        """Return the entry from a tier, or as it arrives from below; then the tiers get it."""
        lookup = self._in_tiers(text, fingerprint)
        if lookup is None:
            running = self._loading.get((text, fingerprint))
            lookup = None if running is None or running.done() else running.result()
        if lookup is not None:
            return Opened(lookup.entry, lookup.reason, lookup.expires_at)
        deletions = self._deletions
        began = time.perf_counter()
        opened = self.below.open(text, fingerprint)
        opening, expires_at = time.perf_counter() - began, opened.expires_at

        def keep(entry: LayeredKV, seconds: float) -> None:  # held by the entry: not to hold it
            self.load_rate.add(entry.nbytes, opening + seconds)
            self._offer(entry, fingerprint, expires_at, deletions)

        if isinstance(opened.entry, LazyKV):
            opened.entry.then(whole=keep)
        elif opened.entry is not None:
            keep(opened.entry, 0.0)
        return opened

    def _in_tiers(self, text: str, fingerprint: Fingerprint) -> Lookup | None:
        """Return a tier's entry; one of a later tier is offered to those before."""
        deletions = self._deletions
        for level, tier in enumerate(self.tiers):
            lookup = tier.get(text, fingerprint)
            if lookup.entry is not None:
                if level:
                    self._offer(lookup.entry, fingerprint, lookup.expires_at, deletions)
                return lookup
        return None

    def put(
        self,
        entry: ChunkKV,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> int:
        """Write through: below first.

        What a codec rounds is not kept here as it was before: every reader gets the same.
        """
        deletions = self._deletions
        nbytes = self.below.put(entry, fingerprint, document=document, expires_at=expires_at)
        if expires_at == KEPT:
            expires_at = self.below.expiry(entry.text)
        for tier in self.tiers:
            tier.drop(entry.text, fingerprint)
        if nbytes and codec_of(fingerprint.codec).lossless:
            self._fill(entry, fingerprint, expires_at, deletions)
        return nbytes

    def hold(
        self,
        text: str,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> bool:
        """Hold the chunk below."""
        held = super().hold(text, fingerprint, document=document, expires_at=expires_at)
        for tier in self.tiers if held else ():
            tier.hold(text, fingerprint, expires_at=expires_at)
        return held

    def delete(self, text: str) -> int:
        """Remove the chunk's entries from all tiers."""
        try:
            return self.below.delete(text)
        finally:
            self._forget([text])

    def keep_only(self, document: str, texts: Iterable[str]) -> int:
        """Let the store below decide; what it removed leaves the tiers."""
        try:
            return super().keep_only(document, texts)
        finally:
            with suppress(StoreError):  # looked at again with the next prompt
                self.changes(self._seen)

    def changes(self, since: int) -> tuple[int, list[str]]:
        """Return the changes of the store below; what was deleted there leaves the tiers."""
        with self._looking:
            number, texts = super().changes(since)
            if number < self._seen:  # the place was emptied, and is another one now
                self._forget({text for tier in self.tiers for text in tier.texts()})
            elif number > self._seen:
                self._forget(self.deletions(self._seen))
            self._seen = number
        return number, texts

    def make_room(self) -> bool:
        """Empty the tier on the device, where there is one."""
        tier = self.tiers[0]
        with self._keeping:
            held = [] if tier.device.type == "cpu" else list(tier.texts())
            return sum(tier.delete(text) for text in held) > 0

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """0 in a tier, otherwise by the speed at which entries came from below lately."""
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

    def _load(self, text: str, fingerprint: Fingerprint) -> Lookup:
        deletions = self._deletions
        started = time.perf_counter()
        lookup = self.below.get(text, fingerprint)
        if lookup.entry is not None:
            self.load_rate.add(lookup.entry.nbytes, time.perf_counter() - started)
            self._offer(lookup.entry, fingerprint, lookup.expires_at, deletions)
        return lookup

    def _offer(self, entry: LayeredKV, *known: Any) -> None:
        """Fill the tiers, at once where that costs nothing."""
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
        """Keep an entry in the tiers, unless something was deleted since ``deletions``."""
        with self._keeping:
            if self._deletions == deletions:
                self._keep(0, entry, fingerprint, expires_at)

    def _keep(
        self, level: int, entry: ChunkKV, fingerprint: Fingerprint, expires_at: float | None
    ) -> None:
        """Offer an entry to a tier, and what leaves it to the next one."""
        if level == len(self.tiers) or self.tiers[level].contains(entry.text, fingerprint):
            return
        left = self.tiers[level].keep(entry, fingerprint, expires_at=expires_at)
        if left is None:
            self._keep(level + 1, entry, fingerprint, expires_at)
        for gone in left or ():
            self._keep(level + 1, *gone)

    def _forget(self, texts: Iterable[str]) -> None:
        with self._keeping:
            for text in texts:
                self._deletions += 1
                for tier in self.tiers:
                    tier.delete(text)
