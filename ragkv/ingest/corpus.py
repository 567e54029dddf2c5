"""A model's chunks in a store: their places in prompts, their entries, reasons for lacking ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from ragkv.chunk.encode import Passes
from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.chunk.sinks import Sink, Sinks
from ragkv.errors import StoreError, StoreFullError
from ragkv.ingest.documents import check_chunk
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.loaded import ReusableModel
from ragkv.model.pool import Pool
from ragkv.prompt.find import ChunkFinder, Span
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.tiered import LEAST_TOKENS, Rate, is_slower
from ragkv.store.types import Found

_log = logging.getLogger(__name__)
_REMOTE_REQUESTS = 16
Answer = TypeVar("Answer")
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


class Corpus:
    """One model's chunks in one store.

    Parameters
    ----------
    passes
        Runs passes of the model.
    codec
        The entries' codec, a part of every fingerprint.

    Attributes
    ----------
    on_removed
        Callback for chunks that any process deleted, without this process's evictions.
    loads_always
        Load entries even if computing is faster; for measurements.
    """

    def __init__(
        self, loaded: ReusableModel, store: ChunkStore, passes: Passes, codec: str = "raw"
    ) -> None:
        self.loaded = loaded
        self.store = store
        self.passes = passes
        self.codec = codec
        self.sinks = Sinks(loaded, passes, codec)
        self.not_stored = NotStored(store)
        self.prefill_rate = Rate()
        """Measured prefill speed, in tokens per second."""
        self.on_removed: Callable[[Sequence[str]], object] = lambda _: None
        self.loads_always = False
        self._finder = ChunkFinder()
        self._lock = threading.Lock()  # for the finder and the position in the store's changes
        self._seen = 0

    @property
    def is_lossless(self) -> bool:
        """Whether an entry's rows equal the encoded ones bit by bit."""
        return self.codec == "raw"

    # ---- texts

    def find(self, prompt: str) -> list[Span]:
        """Return the known chunks in a prompt, including other processes' chunks."""
        self.refresh()
        return self._finder.find(prompt)

    def has(self, text: str) -> bool:
        """Whether the text was a chunk of this namespace at the last :meth:`refresh`."""
        return text in self._finder

    def refresh(self) -> bool:
        """Read the chunks that any process added or deleted; return whether that succeeded."""
        with self._lock:
            try:
                newest, added, removed = self.store.changes(self._seen)
            except StoreError as error:
                _log.warning("cannot read the store's changes: %s", error)
                return False
            self._seen = newest
            self.not_stored.note(removed, "deleted")
            for text in removed:
                self._finder.discard(text)
            self._finder.add(added)
            if deleted := [text for text in removed if not self.store.was_evicted(text)]:
                self.on_removed(deleted)
        return True

    def forget(self, text: str) -> int:
        """Delete a chunk's entries; return their number."""
        text = check_chunk(text)
        with self._lock:  # a put directly after the deletion must not be discarded
            removed = self.store.delete(text)
            self._finder.discard(text)
            if removed:
                self.not_stored.note([text], "deleted")
        return removed

    # ---- entries

    def contains(self, text: str, sink: Sink) -> bool:
        """Whether the chunk is stored for this model behind this sink."""
        return self.store.contains(check_chunk(text), sink.fingerprint)

    def get(self, text: str, sink: Sink) -> Found[ChunkKV]:
        """Return the chunk's entry, or the reason of the miss."""
        return self.store.get(text, sink.fingerprint)

    def open(self, texts: Sequence[str], sink: Sink) -> list[Found[LayeredKV]]:
        """Return the chunks' entries, lazy ones included, or the reasons of the misses.

        See :meth:`ragkv.store.chunk_store.ChunkStore.open`.
        """
        return self._each(partial(self.store.open, fingerprint=sink.fingerprint), texts)

    def fetch(self, texts: Sequence[str], sink: Sink) -> None:
        """Load the chunks' entries into the store's tiers."""
        self._each(lambda text: self.get(text, sink).reason, texts)

    def _each(self, look_up: Callable[[str], Answer], texts: Sequence[str]) -> list[Answer]:
        """Look texts up in the store, concurrently if it is remote."""
        if not self.store.remote or len(texts) < 2:
            return [look_up(text) for text in texts]
        with Pool(min(len(texts), _REMOTE_REQUESTS)) as pool:
            return list(pool.map(look_up, texts))

    # ---- loading or computing

    def is_slower(self, text: str, tokens: int, sink: Sink) -> bool:
        """Whether the chunk is stored, but takes longer to load than to compute."""
        compute = None if self.loads_always else self.prefill_rate.seconds(tokens)
        if compute is None:
            return False
        nbytes = tokens * self.loaded.architecture.values_per_token * self.loaded.dtype.itemsize
        load = self.store.load_seconds(text, sink.fingerprint, nbytes)
        return is_slower(load, compute) and self.store.contains(text, sink.fingerprint)

    def record_speed(self, tokens: int, seconds: float) -> None:
        """Record the time of computing tokens; small numbers of tokens are ignored."""
        if tokens >= LEAST_TOKENS:
            self.prefill_rate.add(tokens, seconds)
