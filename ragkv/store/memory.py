"""A store in this process's memory: least recently used entries leave first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import Lookup, Store

ENTRY_OVERHEAD = 1024
"""Bytes counted for each entry beside its arrays and text."""


class _Kept(NamedTuple):
    lookup: Lookup
    nbytes: int


class MemoryStore(Store):
    """Keeps entries up to a budget, which is never exceeded.

    Parameters
    ----------
    budget
        Bytes. An entry larger than this is not kept at all.

    Notes
    -----
    Every instance is a namespace of its own. A hit returns the same tensors each
    time: whoever changes them in place changes the store.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, Fingerprint], _Kept] = OrderedDict()
        self._fingerprints: dict[str, set[Fingerprint]] = {}
        self._changed: OrderedDict[str, int] = OrderedDict()  # text -> change number, ascending
        self._change = 0
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._nbytes

    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Return the entry itself, without a copy."""
        key = (text, fingerprint)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept.lookup
            return Lookup(None, "fingerprint" if text in self._fingerprints else "absent")

    def put(self, entry: ChunkKV, fingerprint: Fingerprint) -> int:
        """Keep an entry on the CPU; 0 where it is larger than the budget."""
        kept = _keep(entry) if entry.nbytes <= self.budget else None
        key = (entry.text, fingerprint)
        with self._lock:
            self._remove(key)
            if kept is None or kept.nbytes > self.budget:
                return 0
            while self._nbytes + kept.nbytes > self.budget:
                self._remove(next(iter(self._kept)))
            self._kept[key] = kept
            self._nbytes += kept.nbytes
            self._fingerprints.setdefault(entry.text, set()).add(fingerprint)
            self._change += 1
            self._changed[entry.text] = self._change
            self._changed.move_to_end(entry.text)
            return kept.nbytes

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the entry is still there."""
        return (text, fingerprint) in self._kept

    def delete(self, text: str) -> int:
        """Remove the chunk's entries."""
        with self._lock:
            fingerprints = list(self._fingerprints.get(text, ()))
            for fingerprint in fingerprints:
                self._remove((text, fingerprint))
            return len(fingerprints)

    def changes(self, since: int) -> tuple[int, list[str]]:
        """Texts that have left by the budget are missing from the list, like deleted ones."""
        with self._lock:
            newest_first = takewhile(lambda item: item[1] > since, reversed(self._changed.items()))
            return self._change, [text for text, _ in newest_first][::-1]

    def texts(self) -> Iterator[str]:
        """Texts in the order of their last change."""
        with self._lock:
            return iter(list(self._changed))

    def close(self) -> None:
        """Let all entries go."""
        with self._lock:
            self._kept.clear()
            self._fingerprints.clear()
            self._changed.clear()
            self._nbytes = 0

    def _remove(self, key: tuple[str, Fingerprint]) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        text, fingerprint = key
        self._nbytes -= kept.nbytes
        self._fingerprints[text].discard(fingerprint)
        if not self._fingerprints[text]:
            del self._fingerprints[text], self._changed[text]


def _keep(entry: ChunkKV) -> _Kept:
    """Bring the tensors to the CPU, free of larger tensors that they are views of."""
    keys, values = entry.keys.detach().cpu(), entry.values.detach().cpu()
    if _storage_bytes(keys, values) > entry.nbytes:
        keys, values = keys.clone(), values.clone()
    if keys is not entry.keys or values is not entry.values:
        entry = replace(entry, keys=keys, values=values)
    arrays = entry.token_ids.nbytes + entry.offsets.nbytes
    text = len(entry.text.encode("utf-8", "surrogatepass"))
    return _Kept(Lookup(entry), _storage_bytes(keys, values) + arrays + text + ENTRY_OVERHEAD)


def _storage_bytes(*tensors: torch.Tensor) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
