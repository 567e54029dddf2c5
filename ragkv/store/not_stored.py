"""Reasons, known to this process, why chunks are not stored."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from ragkv.errors import StoreFullError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.chunk_store import ChunkStore

MOST_NOTED = 4096
"""Number of texts whose reason is remembered, the latest."""

_DIFFERENT = {
    "weights": "other weights",
    "tokenizer": "another tokenizer",
    "attention": "another model configuration",
    "dtype": "another dtype",
    "sink": "another sink",
    "codec": "another codec",
}


class NotStored:
    """Remembers deleted chunks, and chunks that a store had no room for."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}  # the last at the end

    def note(self, texts: Iterable[str], reason: str) -> None:
        """Remember one of the report's reasons for texts."""
        with self._lock:
            for text in texts:
                self._reasons.pop(text, None)
                self._reasons[text] = reason
            while len(self._reasons) > MOST_NOTED:
                del self._reasons[next(iter(self._reasons))]

    @contextmanager
    def noting_full(self, texts: Iterable[str]) -> Iterator[None]:
        """Note the chunks that the block writes if the store turns out to be full."""
        try:
            yield
        except StoreFullError:
            self.note(texts, "budget")
            raise

    def reason_of(self, text: str) -> str:
        """Return why a chunk is not stored; empty if unknown."""
        if self._store.was_evicted(text):
            return "evicted"
        return self._reasons.get(text, "")

    def differences(self, text: str, required: Fingerprint) -> str:
        """Return how the chunk's nearest entry differs from the model, such as ``another sink``."""
        if self._store.remote:  # reading a header fetches the whole entry
            return ""
        found = [
            [name for name, value in asdict(other).items() if value != getattr(required, name)]
            for other in self._store.fingerprints(text)
        ]
        nearest = min(filter(None, found), key=len, default=[])
        if "dtype" in nearest:  # which implies other bytes of the weights
            nearest = [name for name in nearest if name != "weights"]
        return ", ".join(_DIFFERENT[name] for name in nearest)
