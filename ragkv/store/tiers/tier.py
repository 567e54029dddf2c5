"""A tier: copies of entries in the memory of this process or of the model's device."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.memory import is_out_of_memory
from ragkv.model.workspace import pinned, pinned_bytes
from ragkv.store.tiers.admission import Admission
from ragkv.store.tiers.pgdsf import PGDSF
from ragkv.store.types import TierUse, has_expired, later

_log = logging.getLogger(__name__)
ENTRY_OVERHEAD = 1024
"""Bytes counted for each entry beside its arrays and text."""

_Key = tuple[str, Fingerprint]


class TierEntry(NamedTuple):
    """A copy of an entry, and the expiry time of its chunk."""

    entry: ChunkKV
    fingerprint: Fingerprint
    expires_at: float | None


class MemoryTier:
    """Keeps copies of entries up to a budget, which is never exceeded.

    Parameters
    ----------
    budget
        Bytes. An entry larger than this is not kept at all.
    device
        Where the tensors are kept.
    pin
        Keep the tensors in pinned memory, for asynchronous copies to a GPU. Sizes are rounded up
        to powers of two, as torch allocates them.
    costs
        Cost of computing ``new`` tokens after ``cached`` ones, for eviction; None counts tokens.
    admission
        A full tier admits an entry only if it was requested more often than those it would evict.

    Notes
    -----
    A hit returns the same tensors each time: changing them in place changes the tier.
    """

    def __init__(
        self,
        budget: int,
        *,
        device: str | torch.device = "cpu",
        pin: bool = False,
        costs: Callable[[int, int], float] | None = None,
        admission: bool = False,
    ) -> None:
        self.budget = budget
        self.device = torch.device(device)
        self._pin = pin
        self._costs = costs
        self._policy = PGDSF()
        self._admission = Admission() if admission else None
        self._lock = threading.Lock()
        self._kept: dict[_Key, TierEntry] = {}
        self._fingerprints: dict[str, set[Fingerprint]] = {}
        self._hits = 0

    @property
    def copies(self) -> bool:
        """Whether putting an entry copies it."""
        return self._pin or self.device.type != "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._policy.nbytes

    def in_use(self) -> TierUse:
        """Return the tier's bytes and hits."""
        name = "memory" if self.device.type == "cpu" else "device"
        return TierUse(name, self.nbytes, self._hits)

    def texts(self) -> list[str]:
        """Return the texts of its entries."""
        with self._lock:
            return list(self._fingerprints)

    def get(self, text: str, fingerprint: Fingerprint) -> TierEntry | None:
        """Return an entry, not copied, unless its chunk has expired."""
        self.count_request(text, fingerprint)
        with self._lock:
            found = self._valid(text, fingerprint)
            if found is not None:
                self._policy.hit((text, fingerprint))
                self._hits += 1
            return found

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the entry is there and has not expired."""
        with self._lock:
            return self._valid(text, fingerprint) is not None

    def count_request(self, text: str, fingerprint: Fingerprint) -> None:
        """Count a request for admission, also if an earlier tier served it."""
        if self._admission is not None:
            with self._lock:
                self._admission.count((text, fingerprint), len(self._kept))

    def put(
        self, entry: ChunkKV, fingerprint: Fingerprint, expires_at: float | None = None
    ) -> list[TierEntry] | None:
        """Keep an entry and return those it evicted; None if it is not kept."""
        key, nbytes = (entry.text, fingerprint), self._size(entry)
        with self._lock:
            if not self._admitted(key, nbytes):
                self._remove(key)
                return None
        try:
            entry = (_pinned(entry) if self._pin else None) or _owned(entry, self.device)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise  # an answer never fails because a tier has no memory
            _log.warning("a chunk was not kept on %s: %s", self.device, str(error))
            self.drop(*key)
            return None
        with self._lock:
            cost = float(len(entry)) if self._costs is None else self._costs(0, len(entry))
            for known in self._fingerprints.get(entry.text, ()):
                expires_at = later(self._kept[entry.text, known].expires_at, expires_at)
            self._remove(key)
            evicted = [self._evict(victim) for victim in self._victims(nbytes)]
            self._policy.insert(key, nbytes, cost, len(entry))
            self._kept[key] = TierEntry(entry, fingerprint, expires_at)
            self._fingerprints.setdefault(entry.text, set()).add(fingerprint)
            return evicted

    def extend(self, text: str, expires_at: float | None) -> None:
        """Postpone a chunk's expiry as :class:`ragkv.store.types.Terms` specifies."""
        with self._lock:
            for fingerprint in self._fingerprints.get(text, ()):
                kept = self._kept[text, fingerprint]
                until = later(kept.expires_at, expires_at)
                self._kept[text, fingerprint] = kept._replace(expires_at=until)

    def delete(self, text: str) -> int:
        """Drop a chunk's entries; return how many."""
        with self._lock:
            fingerprints = list(self._fingerprints.get(text, ()))
            for fingerprint in fingerprints:
                self._remove((text, fingerprint))
            return len(fingerprints)

    def drop(self, text: str, fingerprint: Fingerprint) -> None:
        """Drop one entry."""
        with self._lock:
            self._remove((text, fingerprint))

    def clear(self) -> None:
        """Drop all entries."""
        for text in self.texts():
            self.delete(text)

    def _valid(self, text: str, fingerprint: Fingerprint) -> TierEntry | None:
        found = self._kept.get((text, fingerprint))
        return None if found is None or has_expired(found.expires_at, time.time()) else found

    def _size(self, entry: ChunkKV) -> int:
        if not self._pin:
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
        """Return the entries to evict for one of this size."""
        return self._policy.victims(self._policy.nbytes + nbytes - self.budget)  # type: ignore[return-value]

    def _evict(self, key: _Key) -> TierEntry:
        evicted = self._kept[key]
        self._policy.evict(key)
        self._remove(key)
        return evicted

    def _remove(self, key: _Key) -> None:
        if self._kept.pop(key, None) is None:
            return
        self._policy.remove(key)
        text, fingerprint = key
        self._fingerprints[text].discard(fingerprint)
        if not self._fingerprints[text]:
            del self._fingerprints[text]


def size_of(entry: ChunkKV) -> int:
    """Return the bytes that are counted for an entry."""
    arrays = entry.token_ids.nbytes + entry.offsets.nbytes
    text = len(entry.text.encode("utf-8", "surrogatepass"))
    return entry.nbytes + arrays + text + ENTRY_OVERHEAD


def _pinned(entry: ChunkKV) -> ChunkKV | None:
    """Copy the tensors to pinned memory; None if there is none."""
    both = pinned((2, *entry.keys.shape), entry.keys.dtype)
    if both is None:
        return None
    keys, values = both[0].copy_(entry.keys.detach()), both[1].copy_(entry.values.detach())
    return replace(entry, keys=keys, values=values)


def _owned(entry: ChunkKV, device: torch.device) -> ChunkKV:
    """Move the tensors to a device; copy views of larger tensors."""
    keys, values = entry.keys.detach().to(device), entry.values.detach().to(device)
    if _storage_bytes(keys, values) > entry.nbytes:
        keys, values = keys.clone(), values.clone()
    return replace(entry, keys=keys, values=values)


def _storage_bytes(*tensors: torch.Tensor) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
