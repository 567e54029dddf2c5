"""A model's chunks: find them in prompts, encode them, fetch them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ragkv.chunk.encode import encode_chunks, encode_sink
from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.config import ReuseConfig
from ragkv.decode.batch import batch_of, before_layers
from ragkv.engine.ingestion_size import IngestionSize
from ragkv.engine.landmarks import Landmarks
from ragkv.engine.not_stored import NotStored
from ragkv.engine.request import check_chunk, check_chunks, check_document, check_seconds
from ragkv.engine.requests import RequestQueue
from ragkv.errors import ConfigError, StoreError
from ragkv.model.fingerprint import Fingerprint, fingerprint_of, state_of
from ragkv.model.loaded import ReusableModel
from ragkv.model.lock import ModelLock
from ragkv.model.pool import Pool
from ragkv.model.streams import side_stream
from ragkv.prompt.find import ChunkFinder, Span, is_registrable
from ragkv.prompt.render import Rendered, chat_head, render_sink, undated
from ragkv.prompt.tokens import IntArray, Tokens, encode_behind, sink_tokens
from ragkv.report.account import PrecomputeReport
from ragkv.store.base import Found, Terms, has_expired
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.tiers.rates import LEAST_TOKENS, Rate, is_slower

_log = logging.getLogger(__name__)
_REMOTE_REQUESTS = 16
SINKS_KEPT = 16
"""Sinks whose rows stay in memory: the last used."""
Answer = TypeVar("Answer")
Computed = Callable[[str, Tokens, "Sink"], ChunkKV | None]
"""Returns a chunk as a prompt computed it directly behind the sink; None where none did."""


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """The text that chunks are encoded behind, with its tokens, rows and fingerprint."""

    rendered: Rendered
    ids: IntArray
    rows: ChunkKV | None
    fingerprint: Fingerprint


class Corpus:
    """One model's chunks in one store.

    Parameters
    ----------
    lock
        Held while the model runs.
    codec
        How entries are stored: a part of every fingerprint.
    """

    def __init__(
        self,
        loaded: ReusableModel,
        store: ChunkStore,
        lock: ModelLock,
        codec: str = "raw",
    ) -> None:
        self.loaded = loaded
        self.store = store
        self._codec = codec
        self._lock = lock
        self._requests = lock.shared(RequestQueue)
        self._fingerprint, self._state = loaded.fingerprint, loaded.state
        self._sinks: dict[str, Sink] = {}  # the last used at the end
        self._sinks_lock = threading.Lock()
        self._finder = ChunkFinder()
        self._finder_lock = threading.Lock()
        self._seen = 0
        self.on_removed: Callable[[Sequence[str]], object] = lambda _: None
        """Called with deleted chunks, by any process; not with those that this one evicted."""
        self.landmarks = Landmarks(self._finder.__contains__)
        self.not_stored = NotStored(store)
        self.prefill_rate = Rate()
        """Tokens a second that the model computes, as measured."""
        self.loads_always = False  # True: loading itself is measured, or compared bit by bit

    def sink_for(self, config: ReuseConfig) -> Sink:
        """Return the sink that a configuration names."""
        if config.sink == "auto":
            return self.sink(chat_head(self.loaded.tokenizer))
        return self.sink(undated(config.sink, self.loaded.tokenizer))

    def sink(self, text: str) -> Sink:
        """Return the sink of that text, encoding it on first use, and when weights changed."""
        bare = self.usable_fingerprint()
        with self._sinks_lock:
            sink = self._sinks.pop(text, None)
            if sink is not None:
                self._sinks[text] = sink
        if sink is None:
            rendered = render_sink(text, self.loaded.tokenizer)
            tokens = sink_tokens(rendered, self.loaded.tokenizer)
            self.loaded.require_embedded(tokens.ids, f"the sink {text[:40]!r}")
            with self._lock:
                rows = encode_sink(text, tokens, self.loaded) if len(tokens) else None
            fingerprint = bare.with_codec(self._codec).with_sink(tokens.ids.tolist())
            sink = Sink(rendered, tokens.ids, rows, fingerprint)
            if self.usable_fingerprint() is not bare:  # weights changed while it waited
                return self.sink(text)
            with self._sinks_lock:
                self._sinks[text] = sink
                while len(self._sinks) > SINKS_KEPT:
                    del self._sinks[next(iter(self._sinks))]
        return sink

    @property
    def is_lossless(self) -> bool:
        """Whether an entry's rows are, bit by bit, those that were encoded."""
        return self._codec.startswith("raw")

    def usable_fingerprint(self) -> Fingerprint:
        """Return :attr:`fingerprint`; raise for a model whose caches would be invalid."""
        if self.loaded.model.training:
            raise ConfigError(
                "the model is in training mode, where caches are invalid: call model.eval() first"
            )
        return self.fingerprint

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the model as it is now; sinks of a former state are dropped."""
        loaded = self.loaded
        state = state_of(loaded.model)
        if state != self._state:
            _log.info("the weights of %s may have changed", loaded.name)
            with self._sinks_lock:
                self._sinks.clear()
            kinds = loaded.architecture.rope_kinds
            self._fingerprint = fingerprint_of(loaded.model, loaded.tokenizer, kinds)
            self._state = state
        return self._fingerprint

    def _require_unchanged(self, sink: Sink) -> None:
        if self.usable_fingerprint().weights != sink.fingerprint.weights:
            raise ConfigError(
                "the model's weights changed while chunks were encoded: encode them again"
            )

    def find(self, prompt: str) -> list[Span]:
        """Return the known chunks in a prompt, those of other processes included."""
        self.refresh()
        return self._finder.find(prompt)

    def refresh(self) -> bool:
        """Read which chunks were added and deleted, by any process; return whether that went."""
        with self._finder_lock:
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
            self.landmarks.add(added)
            if deleted := [text for text in removed if not self.store.was_evicted(text)]:
                self.on_removed(deleted)
        return True

    def get(self, text: str, sink: Sink) -> Found[ChunkKV]:
        """Return the chunk's entry, or the reason of the miss."""
        return self.store.get(text, sink.fingerprint)

    def open(self, texts: Sequence[str], sink: Sink) -> list[Found[LayeredKV]]:
        """Return the chunks' entries, perhaps lazy, or the reasons of the misses.

        See :meth:`ragkv.store.chunk_store.ChunkStore.open`.
        """
        return self._each(partial(self.store.open, fingerprint=sink.fingerprint), texts)

    def fetch(self, texts: Sequence[str], sink: Sink) -> None:
        """Load the chunks' entries into the store's tiers."""
        self._each(lambda text: self.get(text, sink).reason, texts)

    def _each(self, ask: Callable[[str], Answer], texts: Sequence[str]) -> list[Answer]:
        """Query the store about texts, several at once where it is remote."""
        if not self.store.remote or len(texts) < 2:
            return [ask(text) for text in texts]
        with Pool(min(len(texts), _REMOTE_REQUESTS)) as pool:
            return list(pool.map(ask, texts))

    def is_slower(self, text: str, tokens: int, sink: Sink) -> bool:
        """Whether the chunk is stored, and loading it takes longer than computing it."""
        compute = None if self.loads_always else self.prefill_rate.seconds(tokens)
        if compute is None:
            return False
        nbytes = tokens * self.loaded.architecture.values_per_token * self.loaded.dtype.itemsize
        load = self.store.load_seconds(text, sink.fingerprint, nbytes)
        return is_slower(load, compute) and self.store.contains(text, sink.fingerprint)

    def record_speed(self, tokens: int, seconds: float) -> None:
        """Record the seconds of computing some tokens; small numbers are ignored."""
        if tokens >= LEAST_TOKENS:
            self.prefill_rate.add(tokens, seconds)

    def contains(self, text: str, sink: Sink) -> bool:
        """Whether the chunk is stored for this model behind this sink."""
        return self.store.contains(check_chunk(text), sink.fingerprint)

    def knows(self, text: str, *, refresh: bool = True) -> bool:
        """Whether the text is a chunk in this namespace, for any model."""
        if refresh:
            self.refresh()
        return text in self._finder

    def forget(self, text: str) -> int:
        """Delete a chunk's entries; return how many there were."""
        text = check_chunk(text)
        with self._finder_lock:  # or a put right after the deletion would be discarded
            removed = self.store.delete(text)
            self._finder.discard(text)
            self.not_stored.note([text] * bool(removed), "deleted")
        return removed

    def get_or_encode(self, text: str, sink: Sink, *, keep: bool) -> ChunkKV:
        """Return the chunk's entry; a missing one is encoded now, and stored if ``keep``."""
        found = self.get(text, sink)
        entry = found.entry
        if entry is None:
            chunk = self._tokenized(text, sink)
            self.loaded.require_embedded(chunk[1].ids, f"the chunk {text[:40]!r}")
            with self._lock:
                (entry,) = next(encode_chunks([chunk], sink.rows, self.loaded))
            if keep and found.reason != "expired":
                try:
                    self.store.put(entry, sink.fingerprint, Terms(expires_at=Terms.KEEP))
                except StoreError as error:  # an answer never fails because of storage
                    _log.warning("a chunk was not stored: %s", error)
        return entry

    def encode_missing(self, texts: Iterable[str], sink: Sink, computed: Computed) -> None:
        """Encode chunks that a prompt missed, except expired ones; never raise.

        The model may have changed, or be in training, since the prompt was answered.
        """
        try:
            missed = [text for text in texts if not self._has_expired(text, sink)]
            self._require_unchanged(sink)
            for text in filter(is_registrable, check_chunks(missed)):
                self._put_computed(text, sink, computed)
            self.encode(missed, sink)
        except (StoreError, ConfigError) as error:
            _log.warning("missed chunks were not stored: %s", error)

    def _put_computed(self, text: str, sink: Sink, computed: Computed) -> None:
        """Store a missing chunk as a prompt computed it; where none did, it stays missing."""
        chunk = self._tokenized(text, sink)
        entry = None if self.contains(text, sink) else computed(*chunk, sink)
        if entry is not None:
            with self.not_stored.noting_full([chunk]):
                self.store.put(entry, sink.fingerprint, Terms(expires_at=Terms.KEEP))

    def _has_expired(self, text: str, sink: Sink) -> bool:
        return not self.contains(text, sink) and self.get(text, sink).reason == "expired"

    def encode(
        self,
        texts: Iterable[str],
        sink: Sink,
        *,
        document: str | None = None,
        revision: str | None = None,
        expires_in: float | None = None,
        show_progress: bool | None = False,
    ) -> PrecomputeReport:
        """Encode and store the chunks that are not stored yet.

        Parameters
        ----------
        document
            The document that the chunks belong to. Its former chunks, those of another revision,
            are deleted, unless they are another document's, too.
        revision
            The state of the document that they are from; None if they are the whole document.
        expires_in
            Seconds until the chunks expire. None leaves the expiry time of stored chunks,
            unless they have expired.

        Raises
        ------
        ConfigError
            ``texts`` is one string, or has an item of another type; or the document or the
            seconds are invalid.
        StoreError
            An entry cannot be written; those before it are kept. A StoreFullError comes before
            anything is computed where the disk cannot hold the entries.
        """
        started = time.perf_counter()
        unique = check_chunks(texts)
        if document is not None:
            check_document(document)
        now = time.time()
        expires_at = Terms.KEEP if expires_in is None else now + check_seconds(expires_in)
        wanted = [text for text in unique if is_registrable(text)]
        there = self.store.contains
        if document is not None or expires_in is not None:
            there = partial(self.store.retain, terms=Terms(document, expires_at, revision or ""))
        missing = [text for text in wanted if not there(text, sink.fingerprint)]
        chunks = [self._tokenized(text, sink) for text in missing]
        chunks = [(text, tokens) for text, tokens in chunks if len(tokens)]  # invisible characters
        chunks, unknown, long = self.not_stored.without_unfit(
            chunks, self.loaded, behind=len(sink.ids)
        )
        over = {text for text in missing if has_expired(self.store.expiry(text), now)}
        size = IngestionSize(self.loaded, self._codec, [len(each[1]) for each in chunks])
        seconds = self.prefill_rate.seconds(sum(size.lengths))
        copies = side_stream(self.loaded.device)
        written, waited = 0, 0.0

        def give_way() -> None:
            nonlocal waited
            waited += self._requests.let_pass()

        def write(batch: list[ChunkKV]) -> None:
            nonlocal written
            for entry in batch:
                until = None if expires_in is None and entry.text in over else expires_at
                terms = Terms(document, until, revision or "")
                with copies.on_side_stream(), bar.writing():
                    written += self.store.put(entry, sink.fingerprint, terms)
                bar.stored(len(entry))
            bar.say_left()

        with (
            self.not_stored.noting_full(chunks),
            size.begin(self.store.room(), len(wanted), seconds, show_progress=show_progress) as bar,
            Pool(1, "ragkv-write") as writer,
        ):
            writing = writer.submit(write, [])
            batches = encode_chunks(chunks, sink.rows, self.loaded)
            while True:
                waited = 0.0
                with (
                    self._lock,
                    batch_of(self.loaded).between_layers(self.loaded),
                    before_layers(self.loaded, give_way),
                ):
                    began = time.perf_counter()
                    batch = next(batches, None)
                    self.loaded.wait()  # a device's call returns before its work is done
                    seconds = time.perf_counter() - began - waited
                writing.result()  # at most one batch is written while the next is computed
                if batch is None:
                    break
                self._require_unchanged(sink)
                self.record_speed(sum(map(len, batch)), seconds)
                writing = writer.submit(write, batch)
        report = PrecomputeReport(
            new=len(chunks),
            existing=len(wanted) - len(missing),
            skipped=len(unique) - len(wanted) + len(missing) - len(chunks) - unknown - long,
            too_long=long,
            unknown_token=unknown,
            tokens=bar.tokens,
            bytes=written,
            removed=0 if document is None else self.store.keep_only(document, wanted, revision),
            seconds=time.perf_counter() - started,
        )
        return bar.end(report)

    def _tokenized(self, text: str, sink: Sink) -> tuple[str, Tokens]:
        """Tokenise a chunk, up to the position where the rotary table changes."""
        tokens = encode_behind(sink.rendered, sink.ids, text, self.loaded.tokenizer)
        architecture = self.loaded.architecture
        if architecture.position_limit is None:
            return text, tokens
        room = max(1, architecture.position_limit - len(sink.ids))
        return text, Tokens(tokens.ids[:room], tokens.offsets[:room])
