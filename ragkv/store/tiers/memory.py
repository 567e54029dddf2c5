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

from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.memory import pinned, pinned_bytes
from ragkv.store.base import Changes, EntryInfo, Found, Store, Terms, TierUse, has_expired, later
from ragkv.store.tiers.admission import Admission
from ragkv.store.tiers.policies import make_policy

_log = logging.getLogger(__name__)
ENTRY_OVERHEAD = 1024
"""Bytes counted for each entry beside its arrays and text."""

_DELETIONS_KEPT = 1 << 16
_Key = tuple[str, Fingerprint]


class Evicted(NamedTuple):
    """An evicted entry."""

    entry: ChunkKV
    fingerprint: Fingerprint
    expires_at: float | None


@dataclass(slots=True)
class _Chunk:
    """A text's metadata."""

    change: int
    expires_at: float | None
    fingerprints: set[Fingerprint] = field(default_factory=set)
    documents: dict[str, str] = field(default_factory=dict)  # with their revisions


class MemoryStore(Store):
    """Keeps entries up to a budget, which is never exceeded.

    Parameters
    ----------
    budget
        Bytes. An entry larger than this is not kept at all.
    device
        Where the tensors are kept.
    policy
        Which entry is evicted first, see :func:`ragkv.store.tiers.policies.policy_names`.
    costs
        What computing ``(cached, new)`` tokens takes, for the policies that weigh
        them; None counts every token alike.
    pinned
        Keep the tensors in pinned memory, for asynchronous copies to a GPU. It is allocated
        in powers of two, and counted so.
    admission
        Keep a new entry out of a full store unless it was requested more often than
        those that it would evict. For a tier: a rejected entry is still in the store below.

    Notes
    -----
    Every instance is a namespace of its own. A hit returns the same tensors each
    time: changing them in place changes the store.
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
        self._evicted: OrderedDict[str, None] = OrderedDict()
        self._change = 0
        self._hits = 0

    @property
    def copies(self) -> bool:
        """Whether an entry of the host is copied when it is put."""
        return self._pinned or self.device.type != "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._policy.nbytes

    def tiers_in_use(self) -> tuple[TierUse, ...]:
        """Return this one tier."""
        name = "memory" if self.device.type == "cpu" else "device"
        return (TierUse(name, self.nbytes, self._hits),)

    def open(self, text: str, fingerprint: Fingerprint) -> Found[LayeredKV]:
        """Return the entry itself, without a copy."""
        key = (text, fingerprint)
        with self._lock:
            if self._admission is not None:
                self._admission.count(key, len(self._kept))
            chunk, entry = self._chunks.get(text), self._kept.get(key)
            if chunk is not None and has_expired(chunk.expires_at, time.time()):
                return Found(None, "expired")
            if chunk is None or entry is None:
                return Found(None, "fingerprint" if chunk else "absent")
            self._policy.hit(key)
            self._hits += 1
            return Found(entry, expires_at=chunk.expires_at)

    def count_request(self, text: str, fingerprint: Fingerprint) -> None:
        """Count a request that a tier before this one served, for admission."""
        if self._admission is not None:
            with self._lock:
                self._admission.count((text, fingerprint), len(self._kept))

    def put(self, entry: ChunkKV, fingerprint: Fingerprint, terms: Terms = Terms()) -> int:
        """Keep an entry; 0 where it is larger than the budget, or not admitted."""
        evicted = self.put_evicting(entry, fingerprint, terms)
        return 0 if evicted is None else self._size(entry)

    def put_evicting(
        self, entry: ChunkKV, fingerprint: Fingerprint, terms: Terms
    ) -> list[Evicted] | None:
        """Put an entry and return those that it evicted; None where it is not kept."""
        key, nbytes = (entry.text, fingerprint), self._size(entry)
        with self._lock:
            if not self._admitted(key, nbytes):
                self._remove(key)
                self._note_evicted(entry.text)
                return None
        try:
            entry = (_pinned(entry) if self._pinned else None) or _owned(entry, self.device)
        except torch.OutOfMemoryError as error:  # an answer never fails for want of storage
            _log.warning("a chunk was not kept on %s: %s", self.device, error)
            with self._lock:
                self._remove(key)
            return None
        with self._lock:
            cost = float(len(entry)) if self._costs is None else self._costs(0, len(entry))
            before = self._chunks.get(entry.text)
            self._remove(key)
            evicted = [self._evict(victim) for victim in self._victims(nbytes)]
            self._policy.insert(key, nbytes, cost, len(entry))
            self._kept[key] = entry
            self._change += 1
            chunk = before or _Chunk(self._change, terms.expires_at)
            self._chunks[entry.text] = chunk
            self._chunks.move_to_end(entry.text)
            chunk.change = self._change
            chunk.fingerprints.add(fingerprint)
            _apply(chunk, terms)
            return evicted

    def retain(self, text: str, fingerprint: Fingerprint, terms: Terms) -> bool:
        """Update the chunk's documents and expiry time."""
        with self._lock:
            chunk = self._chunks.get(text) if (text, fingerprint) in self._kept else None
            if chunk is None or has_expired(chunk.expires_at, time.time()):
                return False
            _apply(chunk, terms)
            return True

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the entry is there and has not expired."""
        with self._lock:
            chunk = self._chunks.get(text) if (text, fingerprint) in self._kept else None
            return chunk is not None and not has_expired(chunk.expires_at, time.time())

    def expiry(self, text: str) -> float | None:
        """Return the chunk's time."""
        with self._lock:
            chunk = self._chunks.get(text)
            return None if chunk is None else chunk.expires_at

    def documents(self, text: str) -> list[str]:
        """Return the chunk's documents, sorted."""
        with self._lock:
            chunk = self._chunks.get(text)
            return [] if chunk is None else sorted(chunk.documents)

    def was_evicted(self, text: str) -> bool:
        """Whether it was evicted, or too large, and is not here."""
        with self._lock:
            return text in self._evicted and text not in self._chunks

    def fingerprints(self, text: str) -> list[Fingerprint]:
        """Return those of its entries."""
        with self._lock:
            return list(self._chunks[text].fingerprints) if text in self._chunks else []

    def delete(self, text: str) -> int:
        """Remove the chunk's entries."""
        with self._lock:
            return self._delete(text)

    def drop(self, text: str, fingerprint: Fingerprint) -> None:
        """Drop one entry, as an eviction would."""
        with self._lock:
            self._remove((text, fingerprint))

    def keep_only(self, document: str, texts: Iterable[str], revision: str | None = None) -> int:
        """Remove the document from its other chunks; delete those without a document."""
        wanted = set(texts)
        with self._lock:
            held = {t: c.documents.get(document) for t, c in self._chunks.items()}
            gone = [t for t in held if held[t] not in (None, revision) and t not in wanted]
            for text in gone:
                del self._chunks[text].documents[document]
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

    def changes(self, since: int) -> Changes:
        """Return the changes, of which evictions are none; the last 65,536 deletions are known."""
        with self._lock:
            added = takewhile(lambda item: item[1].change > since, reversed(self._chunks.items()))
            removed = takewhile(lambda item: item[1] > since, reversed(self._deleted.items()))
            return Changes(
                self._change,
                [text for text, _ in added][::-1],
                [text for text, _ in removed][::-1],
            )

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """Return 0: nothing is loaded."""
        del text, fingerprint, nbytes
        return 0.0

    def texts(self) -> Iterator[str]:
        """Texts in the order of their last change."""
        with self._lock:
            return iter(list(self._chunks))

    def close(self) -> None:
        """Drop all entries."""
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
        """Return the entries to evict so that one of this size fits."""
        return self._policy.victims(self._policy.nbytes + nbytes - self.budget)  # type: ignore[return-value]

    def _evict(self, key: _Key) -> Evicted:
        evicted = Evicted(self._kept[key], key[1], self._chunks[key[0]].expires_at)
        self._policy.evict(key)
        self._remove(key)
        self._note_evicted(key[0])
        return evicted

    def _note_evicted(self, text: str) -> None:
        self._evicted[text] = None
        while len(self._evicted) > _DELETIONS_KEPT:
            self._evicted.popitem(last=False)

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


def _apply(chunk: _Chunk, terms: Terms) -> None:
    chunk.expires_at = later(chunk.expires_at, terms.expires_at)
    if terms.document is not None:
        chunk.documents[terms.document] = terms.revision


def _pinned(entry: ChunkKV) -> ChunkKV | None:
    """Copy the tensors to pinned memory; None where there is none."""
    both = pinned((2, *entry.keys.shape), entry.keys.dtype)
    if both is None:
        return None
    keys, values = both[0].copy_(entry.keys.detach()), both[1].copy_(entry.values.detach())
    return replace(entry, keys=keys, values=values)


def _owned(entry: ChunkKV, device: torch.device) -> ChunkKV:
    """Move the tensors to a device, as copies where they are views of larger ones."""
    keys, values = entry.keys.detach().to(device), entry.values.detach().to(device)
    if _storage_bytes(keys, values) > entry.nbytes:
        keys, values = keys.clone(), values.clone()
    return replace(entry, keys=keys, values=values)


def _storage_bytes(*tensors: torch.Tensor) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
