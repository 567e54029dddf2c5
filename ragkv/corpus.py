"""A model's chunks: find them in prompts, encode them, and fetch them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tqdm.auto import tqdm

from ragkv.chunk.encode import encode_chunks, encode_sink
from ragkv.chunk.kv import ChunkKV
from ragkv.errors import ConfigError, StoreError, UnsupportedModelError
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.load import LoadedModel
from ragkv.prompt.find import ChunkFinder, Span, is_registrable
from ragkv.prompt.render import Rendered, render_sink
from ragkv.prompt.tokens import IntArray, Tokens, encode_behind, sink_tokens
from ragkv.report import PrecomputeReport
from ragkv.store.base import Lookup, Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """The text that chunks are encoded behind, with its tokens, rows and fingerprint."""

    rendered: Rendered
    ids: IntArray
    rows: ChunkKV | None
    fingerprint: Fingerprint


class Corpus:
    """The chunks that one model knows in one store.

    Parameters
    ----------
    lock
        Held while the model runs.
    """

    def __init__(
        self, loaded: LoadedModel, store: Store, lock: AbstractContextManager[object]
    ) -> None:
        self.loaded = loaded
        self.store = store
        self._lock = lock
        self._sinks: dict[str, Sink] = {}
        self._finder = ChunkFinder()
        self._finder_lock = threading.Lock()
        self._seen = 0

    def sink(self, text: str) -> Sink:
        """Return the sink of that text, encoding it on first use."""
        if text not in self._sinks:
            if self.loaded.fingerprint is None:
                raise UnsupportedModelError(self.loaded.unsupported)
            rendered = render_sink(text, self.loaded.tokenizer)
            tokens = sink_tokens(rendered, self.loaded.tokenizer)
            with self._lock:
                rows = encode_sink(text, tokens, self.loaded) if len(tokens) else None
            fingerprint = self.loaded.fingerprint.with_sink(tokens.ids.tolist())
            self._sinks[text] = Sink(rendered, tokens.ids, rows, fingerprint)
        return self._sinks[text]

    def find(self, prompt: str) -> list[Span]:
        """Return the known chunks in a prompt, those of other processes included."""
        self._refresh()
        return self._finder.find(prompt)

    def _refresh(self) -> None:
        with self._finder_lock:
            self._seen, added = self.store.changes(self._seen)
            self._finder.add(added)

    def get(self, text: str, sink: Sink) -> Lookup:
        """Return the chunk's entry, or why there is none."""
        return self.store.get(text, sink.fingerprint)

    def contains(self, text: str, sink: Sink) -> bool:
        """Whether the chunk is stored for this model behind this sink."""
        return self.store.contains(text.strip(), sink.fingerprint)

    def forget(self, text: str) -> bool:
        """Remove a chunk's entries; return whether there were any."""
        with self._finder_lock:
            self._finder.discard(text.strip())
        return self.store.delete(text.strip()) > 0

    def get_or_encode(self, text: str, sink: Sink, *, keep: bool) -> ChunkKV:
        """Return the chunk's entry, encoding it now, and keeping it, where it is missing."""
        entry = self.get(text, sink).entry
        if entry is None:
            with self._lock:
                (entry,) = next(
                    encode_chunks([self._tokenized(text, sink)], sink.rows, self.loaded)
                )
            if keep:
                try:
                    self.store.put(entry, sink.fingerprint)
                except StoreError as error:  # an answer never fails for want of storage
                    _log.warning("a chunk was not stored: %s", error)
        return entry

    def encode(
        self, texts: Iterable[str], sink: Sink, *, show_progress: bool = False
    ) -> PrecomputeReport:
        """Encode and store the chunks that are not there yet.

        Raises
        ------
        ConfigError
            ``texts`` is one string, or holds something that is not a string.
        StoreError
            An entry cannot be written; those before it are kept.
        """
        started = time.perf_counter()
        unique = _checked(texts)
        wanted = [text for text in unique if is_registrable(text)]
        missing = [text for text in wanted if not self.contains(text, sink)]
        bar = tqdm(
            total=len(wanted),
            initial=len(wanted) - len(missing),
            desc="precompute",
            unit="chunk",
            disable=not show_progress,
        )
        tokens = written = 0
        with bar:
            batches = encode_chunks(
                [self._tokenized(text, sink) for text in missing], sink.rows, self.loaded
            )
            while True:
                with self._lock:
                    batch = next(batches, None)
                if batch is None:
                    break
                for entry in batch:
                    written += self.store.put(entry, sink.fingerprint)
                    tokens += len(entry)
                    bar.update()
        return PrecomputeReport(
            new=len(missing),
            existing=len(wanted) - len(missing),
            skipped=len(unique) - len(wanted),
            tokens=tokens,
            bytes=written,
            seconds=time.perf_counter() - started,
        )

    def _tokenized(self, text: str, sink: Sink) -> tuple[str, Tokens]:
        return text, encode_behind(sink.rendered, sink.ids, text, self.loaded.tokenizer)


def _checked(texts: Iterable[str]) -> Sequence[str]:
    """Return the stripped texts, each once, in order."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ConfigError("precompute() takes a list of chunk texts, not one string or object")
    unique: dict[str, None] = {}
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(f"a chunk must be a string, not {type(text).__name__}")
        unique[text.strip()] = None
    return list(unique)
