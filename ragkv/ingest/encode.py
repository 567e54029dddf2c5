"""Encode and store chunks: those of an ingestion, and missed ones."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ragkv.chunk.encode import encode_chunks
from ragkv.chunk.kv import ChunkKV
from ragkv.chunk.sinks import Sink
from ragkv.errors import ConfigError, StoreError
from ragkv.ingest.corpus import Corpus
from ragkv.ingest.documents import check_chunks, check_document, check_seconds
from ragkv.ingest.size import IngestionSize
from ragkv.model.pool import Pool
from ragkv.model.streams import side_stream
from ragkv.prompt.find import is_registrable
from ragkv.prompt.tokens import Tokens, encode_behind
from ragkv.report.account import PrecomputeReport
from ragkv.report.ingestion_progress import IngestionProgress
from ragkv.report.words import count
from ragkv.store.types import Terms, has_expired

_log = logging.getLogger(__name__)
TokenizedChunk = tuple[str, Tokens]
Computed = Callable[[str, Tokens, Sink], ChunkKV | None]
"""Returns a chunk's rows from a prompt that had it directly behind the sink; None without one."""


@dataclass(frozen=True, slots=True)
class _Fitting:
    """Chunks that can be encoded, and the numbers of others by reason."""

    chunks: list[TokenizedChunk]
    unknown_token: int
    too_long: int


def encode(
    corpus: Corpus,
    texts: Iterable[str],
    sink: Sink,
    *,
    document: str | None = None,
    revision: str | None = None,
    expires_in: float | None = None,
    show_progress: bool | None = False,
) -> PrecomputeReport:
    """Encode and store the chunks that are not stored yet.

    The arguments are those of :meth:`ragkv.RagKV.precompute`. An ``expires_in`` of None leaves the
    expiry time of stored chunks, unless they have expired.

    Raises
    ------
    ConfigError
        ``texts`` is a string or has an item of a different type, or the document or the seconds
        are invalid.
    StoreError
        An entry cannot be written; earlier ones are kept. If the disk cannot hold the entries,
        StoreFullError is raised before any computation.
    """
    started = time.perf_counter()
    unique = check_chunks(texts)
    if document is not None:
        check_document(document)
    expires_at = Terms.KEEP if expires_in is None else time.time() + check_seconds(expires_in)
    terms = Terms(document, expires_at, revision or "")
    registrable = [text for text in unique if is_registrable(text)]
    missing = _missing(corpus, registrable, sink, terms)
    chunks = [(text, tokenized(corpus, text, sink)) for text in missing]
    visible = [chunk for chunk in chunks if len(chunk[1])]
    fitting = _fitting(corpus, visible, behind=len(sink.ids))
    size = IngestionSize(corpus.loaded, corpus.codec, [len(each[1]) for each in fitting.chunks])
    seconds = corpus.prefill_rate.seconds(sum(size.lengths))
    with (
        corpus.not_stored.noting_full(text for text, _ in fitting.chunks),
        size.begin(
            corpus.store.room(), len(registrable), seconds, show_progress=show_progress
        ) as bar,
    ):
        written = _compute_and_write(corpus, fitting.chunks, sink, terms, bar)
    removed = 0
    if document is not None:
        removed = corpus.store.keep_only(document, registrable, revision)
    report = PrecomputeReport(
        new=len(fitting.chunks),
        existing=len(registrable) - len(missing),
        skipped=len(unique) - len(registrable) + len(missing) - len(visible),
        too_long=fitting.too_long,
        unknown_token=fitting.unknown_token,
        tokens=bar.tokens,
        bytes=written,
        removed=removed,
        seconds=time.perf_counter() - started,
    )
    return bar.end(report)


def _missing(corpus: Corpus, texts: Sequence[str], sink: Sink, terms: Terms) -> list[str]:
    """Return the texts without an entry; apply the terms to existing entries."""
    is_stored = corpus.store.contains
    if terms.document is not None or terms.expires_at != Terms.KEEP:
        is_stored = partial(corpus.store.retain, terms=terms)
    return [text for text in texts if not is_stored(text, sink.fingerprint)]


def tokenized(corpus: Corpus, text: str, sink: Sink) -> Tokens:
    """Tokenise a chunk, up to the position limit of its rotary table."""
    tokens = encode_behind(sink.rendered, sink.ids, text, corpus.loaded.tokenizer)
    limit = corpus.loaded.architecture.position_limit
    if limit is None:
        return tokens
    room = max(1, limit - len(sink.ids))
    return Tokens(tokens.ids[:room], tokens.offsets[:room])


def _fitting(corpus: Corpus, chunks: Sequence[TokenizedChunk], *, behind: int) -> _Fitting:
    """Exclude and record chunks that no prompt can hold behind ``behind`` tokens."""
    loaded, not_stored = corpus.loaded, corpus.not_stored
    known, fitting = list[TokenizedChunk](), list[TokenizedChunk]()
    for text, tokens in chunks:
        try:
            loaded.require_embedded(tokens.ids, f"the chunk {text[:40]!r}")
            known.append((text, tokens))
        except ConfigError as error:
            if not_stored.reason_of(text) != "unknown_token":  # logged once
                _log.warning("a chunk was not encoded: %s", error)
            not_stored.note([text], "unknown_token")
    for text, tokens in known:
        if behind + len(tokens) < (loaded.positions or sys.maxsize):
            fitting.append((text, tokens))
        else:
            not_stored.note([text], "too_long")
    long = len(known) - len(fitting)
    if long:
        _log.warning(
            "longer than the model's %d positions and not encoded: %s. Split into smaller chunks.",
            loaded.positions,
            count(long, "chunk"),
        )
    return _Fitting(fitting, len(chunks) - len(known), long)


def _compute_and_write(
    corpus: Corpus,
    chunks: Sequence[TokenizedChunk],
    sink: Sink,
    terms: Terms,
    bar: IngestionProgress,
) -> int:
    """Encode chunks, and write each batch while the next is computed; return the bytes."""
    now = time.time()
    expired = {text for text, _ in chunks if has_expired(corpus.store.expiry(text), now)}
    copies = side_stream(corpus.loaded.device)

    def write(batch: Sequence[ChunkKV]) -> int:
        written = 0
        for entry in batch:
            own = terms
            if terms.expires_at == Terms.KEEP and entry.text in expired:
                own = Terms(terms.document, None, terms.revision)
            with copies.on_side_stream(), bar.writing():
                written += corpus.store.put(entry, sink.fingerprint, own)
            bar.stored(len(entry))
        bar.say_left()
        return written

    batches = encode_chunks(chunks, sink.rows, corpus.loaded)

    def compute() -> list[ChunkKV] | None:
        batch = next(batches, None)
        corpus.loaded.wait()  # device calls return before the work is done
        return batch

    total = 0
    with Pool(1, "ragkv-write") as writer:
        writing = writer.submit(write, ())
        while True:
            batch, seconds = corpus.passes.run(compute)
            total += writing.result()
            if batch is None:
                return total
            corpus.sinks.require_unchanged(sink)
            corpus.record_speed(sum(map(len, batch)), seconds)
            writing = writer.submit(write, batch)


# ---- missed chunks


def encode_missing(corpus: Corpus, texts: Iterable[str], sink: Sink, computed: Computed) -> None:
    """Encode a prompt's missed chunks, except expired ones. Failures are logged.

    The model can have changed since the prompt, or be in training.
    """
    try:
        missed = [text for text in texts if not _has_expired(corpus, text, sink)]
        corpus.sinks.require_unchanged(sink)
        for text in filter(is_registrable, check_chunks(missed)):
            _put_computed(corpus, text, sink, computed)
        encode(corpus, missed, sink)
    except (StoreError, ConfigError) as error:
        _log.warning("missed chunks were not stored: %s", error)


def get_or_encode(corpus: Corpus, text: str, sink: Sink, *, keep: bool) -> ChunkKV:
    """Return the chunk's entry; encode a missing one now, and store it if ``keep``."""
    found = corpus.get(text, sink)
    if found.entry is not None:
        return found.entry
    tokens = tokenized(corpus, text, sink)
    corpus.loaded.require_embedded(tokens.ids, f"the chunk {text[:40]!r}")
    batches = encode_chunks([(text, tokens)], sink.rows, corpus.loaded)
    batch, _ = corpus.passes.run(lambda: next(batches))
    entry = batch[0]
    if keep and found.reason != "expired":
        try:
            corpus.store.put(entry, sink.fingerprint, Terms(expires_at=Terms.KEEP))
        except StoreError as error:  # no answer fails because of storage
            _log.warning("a chunk was not stored: %s", error)
    return entry


def _put_computed(corpus: Corpus, text: str, sink: Sink, computed: Computed) -> None:
    """Store a missing chunk's rows from a prompt that computed them, if there is one."""
    if corpus.contains(text, sink):
        return
    entry = computed(text, tokenized(corpus, text, sink), sink)
    if entry is not None:
        with corpus.not_stored.noting_full([text]):
            corpus.store.put(entry, sink.fingerprint, Terms(expires_at=Terms.KEEP))


def _has_expired(corpus: Corpus, text: str, sink: Sink) -> bool:
    return not corpus.contains(text, sink) and corpus.get(text, sink).reason == "expired"
