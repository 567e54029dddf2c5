"""A store in this process's memory, or on the model's device, within a budget."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.memory import pinned, pinned_bytes
from ragkv.store.base import EntryInfo, Lookup, Store, has_expired, later
from ragkv.store.tiers.admission import Admission
from ragkv.store.tiers.policies import make_policy

_log = logging.getLogger(__name__)
ENTRY_OVERHEAD = 1024
"""Bytes counted for each entry beside its arrays and text."""

_DELETIONS_KEPT = 1 << 16
_Key = tuple[str, Fingerprint]


class Left(NamedTuple):
    """An entry that left for want of room."""

    entry: ChunkKV
    fingerprint: Fingerprint
    expires_at: float | None


@dataclass(slots=True)
class _Chunk:
    """What is known of a text beside its entries."""

    change: int
    expires_at: float | None
    fingerprints: set[Fingerprint] = field(default_factory=set)
    documents: set[str] = field(default_factory=set)


class MemoryStore(Store):
    """Keeps entries up to a budget, which is never exceeded.

    Parameters
    ----------
    budget
        Bytes. An entry larger than this is not kept at all.
    device
        Where the tensors are kept.
    policy
        Which entry leaves first, see :func:`ragkv.store.tiers.policies.policy_names`.
    costs
        Seconds that computing ``(cached, new)`` tokens takes, for the policies that weigh
        them; None counts every token alike.
    pinned
        Keep the tensors in memory that a GPU copies from by itself. It is taken in powers
        of two, and so counted.
    admission
        Keep a new entry out of a full store unless it was asked for more often than
        those that would leave. For a tier: what is kept out is still in the store below.

    Notes
    -----
    Every instance is a namespace of its own. A hit returns the same tensors each
    time: whoever changes them in place changes the store.
    """

    def __init__(
        self,
        budget: int,
        *,
        device: str | torch.device = "cpu",
        pinned: bool = False,
        policy: str = "lru",
        costs: Callable[[int, int], float] | None = None,
        admission: bool = False,
    ) -> None:
        self.budget = budget
        self.device = torch.device(device)
        self._pinned = pinned
        self._costs = costs
        self._policy = make_policy(policy)
        self._admission = Admission() if admission else None
        self._lock = threading.Lock()
        self._kept: dict[_Key, ChunkKV] = {}
        self._chunks: OrderedDict[str, _Chunk] = OrderedDict()  # by change number, ascending
        self._deleted: OrderedDict[str, int] = OrderedDict()  # text -> change number, ascending
        self._change = 0

    @property
    def copies(self) -> bool:
        """Whether an entry that is put here on the host is copied."""
        return self._pinned or self.device.type != "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._policy.nbytes

    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Return the entry itself, without a copy."""
        key = (text, fingerprint)
        with self._lock:
            if self._admission is not None:
                self._admission.asked(key, len(self._kept))
            chunk, entry = self._chunks.get(text), self._kept.get(key)
            if chunk is not None and has_expired(chunk.expires_at, time.time()):
                return Lookup(None, "expired")
            if chunk is None or entry is None:
                return Lookup(None, "fingerprint" if chunk else "absent")
            self._policy.hit(key)
            return Lookup(entry, expires_at=chunk.expires_at)

    def put(
        self,
        entry: ChunkKV,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> int:
        """Keep an entry; 0 where it is larger than the budget, or not admitted."""
        left = self.keep(entry, fingerprint, document=document, expires_at=expires_at)
        return 0 if left is None else self._size(entry)

    def keep(
        self,
        entry: ChunkKV,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> list[Left] | None:
        """Put an entry and return those that left for it; None where it is not kept."""
        key, nbytes = (entry.text, fingerprint), self._size(entry)
        seconds = float(len(entry)) if self._costs is None else self._costs(0, len(entry))
        with self._lock:
            if not self._admitted(key, nbytes):
                self._remove(key)
                return None
        try:
            entry = (_pinned(entry) if self._pinned else None) or _owned(entry, self.device)
        except torch.OutOfMemoryError as error:  # an answer never fails for want of storage
            _log.warning("a chunk was not kept on %s: %s", self.device, error)
            with self._lock:
                self._remove(key)
            return None
        with self._lock:
            before = self._chunks.get(entry.text)
            self._remove(key)
            left = [self._evict(victim) for victim in self._victims(nbytes)]
            self._policy.insert(key, nbytes, seconds, len(entry))
            self._kept[key] = entry
            self._change += 1
            chunk = before or _Chunk(self._change, expires_at)
            self._chunks[entry.text] = chunk
            self._chunks.move_to_end(entry.text)
            chunk.change = self._change
            chunk.fingerprints.add(fingerprint)
            _hold(chunk, document, expires_at)
            return left

    def hold(
        self,
        text: str,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> bool:
        """Enter a document and a time for an entry that is there."""
        with self._lock:
            chunk = self._chunks.get(text) if (text, fingerprint) in self._kept else None
            if chunk is None or has_expired(chunk.expires_at, time.time()):
                return False
            _hold(chunk, document, expires_at)
            return True

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the entry is still there and its time is not over."""
        with self._lock:
            chunk = self._chunks.get(text) if (text, fingerprint) in self._kept else None
            return chunk is not None and not has_expired(chunk.expires_at, time.time())

    def expiry(self, text: str) -> float | None:
        """Return the chunk's time."""
        with self._lock:
            chunk = self._chunks.get(text)
            return None if chunk is None else chunk.expires_at

    def delete(self, text: str) -> int:
        """Remove the chunk's entries."""
        with self._lock:
            return self._delete(text)

    def drop(self, text: str, fingerprint: Fingerprint) -> None:
        """Let go of one entry, as if for want of room."""
        with self._lock:
            self._remove((text, fingerprint))

    def keep_only(self, document: str, texts: Iterable[str]) -> int:
        """Take the document from all its other chunks; delete those that no other holds."""
        wanted = set(texts)
        with self._lock:
            held = [t for t, c in self._chunks.items() if document in c.documents]
            gone = [text for text in held if text not in wanted]
            for text in gone:
                self._chunks[text].documents.discard(document)
            return sum(self._delete(t) > 0 for t in gone if not self._chunks[t].documents)

    def entries(self) -> Iterator[EntryInfo]:
        """Entries in the order of their texts' last change."""
        with self._lock:
            return iter(
                [
                    EntryInfo(
                        text,
                        fingerprint.digest,
                        self._policy.size((text, fingerprint)),
                        tuple(sorted(chunk.documents)),
                        chunk.expires_at,
                    )
                    for text, chunk in self._chunks.items()
                    for fingerprint in chunk.fingerprints
                ]
            )

    def changes(self, since: int) -> tuple[int, list[str]]:
        """Texts that have left by the budget are missing from the list, like deleted ones."""
        with self._lock:
            newest = takewhile(lambda item: item[1].change > since, reversed(self._chunks.items()))
            return self._change, [text for text, _ in newest][::-1]

    def deletions(self, since: int) -> list[str]:
        """The last 65,536 deletions are known; leaving by the budget is none."""
        with self._lock:
            newest = takewhile(lambda item: item[1] > since, reversed(self._deleted.items()))
            return [text for text, _ in newest][::-1]

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """Nothing is loaded."""
        del text, fingerprint, nbytes
        return 0.0

    def texts(self) -> Iterator[str]:
        """Texts in the order of their last change."""
        with self._lock:
            return iter(list(self._chunks))

    def close(self) -> None:
        """Let all entries go."""
        with self._lock:
            for key in list(self._kept):
                self._remove(key)

    def _size(self, entry: ChunkKV) -> int:
        if not self._pinned:
            return size_of(entry)
        return size_of(entry) - entry.nbytes + pinned_bytes(entry.nbytes)

    def _admitted(self, key: _Key, nbytes: int) -> bool:
        if nbytes > self.budget:
            return False
        victims = self._victims(nbytes)
        if self._admission is None or key in self._kept or not victims:
            return True
        return self._admission.admits(key, victims)

    def _victims(self, nbytes: int) -> list[_Key]:
        """Return who leaves so that an entry of this size fits."""
        return self._policy.victims(self._policy.nbytes + nbytes - self.budget)  # type: ignore[return-value]

    def _evict(self, key: _Key) -> Left:
        left = Left(self._kept[key], key[1], self._chunks[key[0]].expires_at)
        self._policy.evict(key)
        self._remove(key)
        return left

    def _delete(self, text: str) -> int:
        chunk = self._chunks.get(text)
        if chunk is None:
            return 0
        removed = len(chunk.fingerprints)
        for fingerprint in list(chunk.fingerprints):
            self._remove((text, fingerprint))
        self._change += 1
        self._deleted[text] = self._change
        self._deleted.move_to_end(text)
        while len(self._deleted) > _DELETIONS_KEPT:
            self._deleted.popitem(last=False)
        return removed

    def _remove(self, key: _Key) -> None:
        if self._kept.pop(key, None) is None:
            return
        self._policy.remove(key)
        text, fingerprint = key
        chunk = self._chunks[text]
        chunk.fingerprints.discard(fingerprint)
        if not chunk.fingerprints:
            del self._chunks[text]


def size_of(entry: ChunkKV) -> int:
    """Return the bytes that are counted for an entry."""
    arrays = entry.token_ids.nbytes + entry.offsets.nbytes
    text = len(entry.text.encode("utf-8", "surrogatepass"))
    return entry.nbytes + arrays + text + ENTRY_OVERHEAD


def _hold(chunk: _Chunk, document: str | None, expires_at: float | None) -> None:
    chunk.expires_at = later(chunk.expires_at, expires_at)
    if document is not None:
        chunk.documents.add(document)


def _pinned(entry: ChunkKV) -> ChunkKV | None:
    """Copy the tensors to pinned memory; None where there is none."""
    both = pinned((2, *entry.keys.shape), entry.keys.dtype)
    if both is None:
        return None
    keys, values = both[0].copy_(entry.keys.detach()), both[1].copy_(entry.values.detach())
    return replace(entry, keys=keys, values=values)


def _owned(entry: ChunkKV, device: torch.device) -> ChunkKV:
    """Bring the tensors to a device, free of larger tensors that they are views of."""
    keys, values = entry.keys.detach().to(device), entry.values.detach().to(device)
    if _storage_bytes(keys, values) > entry.nbytes:
        keys, values = keys.clone(), values.clone()
    return replace(entry, keys=keys, values=values)


def _storage_bytes(*tensors: torch.Tensor) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
