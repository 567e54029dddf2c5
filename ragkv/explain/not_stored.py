"""Why chunks are not stored, as far as this process knows."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from ragkv.errors import ConfigError, StoreFullError
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.loaded import LoadedModel
from ragkv.prompt.tokens import Tokens
from ragkv.report.plural import count
from ragkv.store.chunk_store import ChunkStore

_log = logging.getLogger(__name__)
Chunks = list[tuple[str, Tokens]]
MOST_NOTED = 4096
"""Texts whose reason is remembered: the last."""

_DIFFERENT = {
    "weights": "other weights",
    "tokenizer": "another tokenizer",
    "attention": "another model configuration",
    "dtype": "another dtype",
    "sink": "another sink",
    "codec": "another codec",
}


class NotStored:
    """Remembers what was deleted, and what a store did not take."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}  # the last at the end

    def note(self, texts: Iterable[str], reason: str) -> None:
        """Remember the reason of texts, one of the report's."""
        with self._lock:
            for text in texts:
                self._reasons.pop(text, None)
                self._reasons[text] = reason
            while len(self._reasons) > MOST_NOTED:
                del self._reasons[next(iter(self._reasons))]

    def without_unfit(
        self, chunks: Chunks, loaded: LoadedModel, *, behind: int
    ) -> tuple[Chunks, int, int]:
        """Leave out, and note, chunks that no prompt can hold ``behind`` so many tokens.

        Returns
        -------
        tuple
            The others, and how many have a token without an embedding, or are too long.
        """
        known, fitting = Chunks(), Chunks()
        for text, tokens in chunks:
            try:
                loaded.require_embedded(tokens.ids, f"the chunk {text[:40]!r}")
                known.append((text, tokens))
            except ConfigError as error:
                if self._reasons.get(text) != "unknown_token":  # said once
                    _log.warning("a chunk was left out: %s", error)
                self.note([text], "unknown_token")
        for text, tokens in known:
            if behind + len(tokens) < (loaded.positions or sys.maxsize):
                fitting.append((text, tokens))
            else:
                self.note([text], "too_long")
        if len(fitting) < len(known):
            _log.warning(
                "left out, longer than the model's %d positions: %s. Split into smaller chunks.",
                loaded.positions,
                count(len(known) - len(fitting), "chunk"),
            )
        return fitting, len(chunks) - len(known), len(known) - len(fitting)

    @contextmanager
    def noting_full(self, chunks: Iterable[tuple[str, object]]) -> Iterator[None]:
        """Note the chunks, which are being written, where the store turns out to be full."""
        try:
            yield
        except StoreFullError:
            self.note((text for text, _ in chunks), "budget")
            raise

    def reason_of(self, text: str) -> str:
        """Return why a chunk is not stored; empty where nothing is known."""
        if self._store.was_evicted(text):
            return "evicted"
        return self._reasons.get(text, "")

    def differences(self, text: str, wanted: Fingerprint) -> str:
        """Return what a chunk is stored for and the model is not, such as ``another sink``."""
        if self._store.remote:  # each entry would be fetched
            return ""
        found = [
            [name for name, value in asdict(other).items() if value != getattr(wanted, name)]
            for other in self._store.fingerprints(text)
        ]
        nearest = min(filter(None, found), key=len, default=[])
        if "dtype" in nearest:  # and so the weights' bytes
            nearest = [name for name in nearest if name != "weights"]
        return ", ".join(_DIFFERENT[name] for name in nearest)
