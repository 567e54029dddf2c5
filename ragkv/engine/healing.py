"""Healing: chunks that are requested together are computed exactly while no request runs.

A *run* is a prompt up to the end of one of its chunks. A run that was requested twice, or was
prefetched, is computed chunk by chunk, and every later prompt finds its rows in the tree. A stored
chunk behind only the sink and stored chunks is also a *version* (Cache-Craft): prompts that have it
behind different chunks can take the version instead of its entry, and the store keeps it. A version
contains no other text of a prompt. Ingestion can compute one of each chunk, behind its neighbours.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile

import numpy as np

from ragkv.attend.forward import SubsetPass
from ragkv.attend.graphs import look_over, repair_forward
from ragkv.chunk.sinks import SINKS_KEPT, Sink
from ragkv.engine.plan import Plan, Request
from ragkv.engine.runs import (
    Paid,
    Run,
    RunChunk,
    adds_attention,
    chain_of,
    chunk_at,
    chunks_of,
    version_in,
)
from ragkv.history.history import History
from ragkv.history.versions import Versions
from ragkv.ingest.corpus import Corpus
from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.chat import TokenIds
from ragkv.prompt.render import Rendered
from ragkv.prompt.tokens import IntArray, Tokens, tokenize
from ragkv.schedule.beside import IdleWork
from ragkv.schedule.requests import Cancelled, RequestQueue
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import lay_out
from ragkv.splice.place import splice

MOST_RUNS = 512
"""Number of runs whose requests are counted: the most recently requested ones."""
ENOUGH = 2
"""Number of requests after which a run is healed."""
_WINDOWS = ((2, 6), (2, 3), (2, 1), (1, 1))
"""Numbers of chunks before the first version of an ingestion's pass, and of versions in it."""
_WINDOW_TOKENS = 4096
"""Most tokens of such a pass; longer ones take the next numbers."""
_GAP = "\n\n"
"""Text between prefetched chunks, until a prompt shows a different separator."""


class Healing:
    """Counts the requests of runs, and computes the frequent ones.

    Parameters
    ----------
    budget
        Bytes of the tree. A run that needs more than half of them is not healed.
    """

    def __init__(
        self,
        corpus: Corpus,
        history: History,
        versions: Versions,
        requests: RequestQueue,
        budget: int,
    ) -> None:
        self._corpus = corpus
        self._history = history
        self._versions = versions
        self._idle = IdleWork(corpus.loaded, requests)
        self._budget = budget
        self._runs = OrderedDict[tuple[int, Fingerprint], Run]()
        self._frames: dict[str, tuple[Rendered, str]] = {}
        self._works = False
        self._lock = threading.Lock()
        self.tokens = 0
        """Number of computed tokens."""

    # ---- requests

    def note(self, request: Request, plan: Plan) -> bool:
        """Count a prompt's runs; return whether the caller must start :meth:`work`."""
        located = plan.located
        sink, tokens = located.sink, located.tokens
        if sink is None or not request.uses_history or self._history.is_beyond(len(tokens)):
            return False
        chunks = tuple(chunks_of(located))
        if not chunks or not self._budget:
            return False
        usual = not isinstance(request.prompt, TokenIds) or np.array_equal(
            tokenize(located.rendered, self._corpus.loaded.tokenizer).ids, tokens.ids
        )
        # other prompts, which the tokenizer writes, use versions
        chain = chain_of(located, sink, chunks) if usual else 0
        if chain == len(chunks):
            first, *others = located.known or ()
            gap = located.text[first.end : others[0].start] if others else _GAP
            head = replace(located.rendered, text=located.text[: first.start])
            self._frames[sink.rendered.text] = head, gap
            while len(self._frames) > SINKS_KEPT:
                del self._frames[next(iter(self._frames))]
        return self._count(Run(tokens.ids, chunks, chain, sink, request.clock.started, 1))

    def prefetch(self, texts: Sequence[str], sink: Sink) -> bool:
        """Request the run of chunks in this order; return as :meth:`note` does."""
        run = self._run_of(list(dict.fromkeys(texts)), sink)
        self._corpus.refresh()
        if run is None or not all(map(self._corpus.has, texts)):
            return False
        return self._budget > 0 and self._count(run)

    def _run_of(self, texts: Sequence[str], sink: Sink) -> Run | None:
        """Return the run of distinct chunks in this order; None if it is too long."""
        begun = time.perf_counter()
        frame = self._frames.get(sink.rendered.text)
        head, gap = frame or (sink.rendered, _GAP)
        text, spans = head.text, list[tuple[str, int]]()
        for each in texts:
            text += gap if spans else ""
            spans.append((each, len(text)))
            text += each
        rendered = Rendered(text, head.add_special_tokens)
        tokens = tokenize(rendered, self._corpus.loaded.tokenizer)
        chunks = tuple(chunk_at(tokens, each, start) for each, start in spans)
        limit = self._corpus.loaded.positions
        fits = limit is None or len(tokens) < limit
        fits = fits and not len(self._corpus.loaded.without_embedding(tokens.ids))
        if not fits or self._history.is_beyond(len(tokens)):
            return None
        return Run(tokens.ids, chunks, len(chunks), sink, begun, ENOUGH)

    def _count(self, whole: Run) -> bool:
        with self._lock:
            is_due = False
            for count, chunk in enumerate(whole.chunks, 1):
                ids = whole.ids[: chunk.stop]
                key = _key(ids, whole.sink)
                run = self._runs.get(key)
                if run is None:
                    chunks, chain = whole.chunks[:count], min(whole.chain, count)
                    run = replace(whole, ids=ids.copy(), chunks=chunks, chain=chain, requests=0)
                    self._runs[key] = run
                run.requests += whole.requests
                run.begun = max(run.begun, whole.begun)
                self._runs.move_to_end(key)
                is_due |= run.requests >= ENOUGH
            while len(self._runs) > MOST_RUNS:
                self._runs.popitem(last=False)
            works, self._works = self._works, self._works or is_due
            return is_due and not works

    # ---- background work

    def work(self) -> None:
        """Compute the frequent runs, the hottest first."""
        with suppress(Cancelled):
            while run := self._next():
                try:
                    self._heal(run)
                except Exception:  # a later call continues
                    with self._lock:
                        self._works = False
                    raise

    def _next(self) -> Run | None:
        with self._lock:
            runs = [run for run in self._runs.values() if run.requests >= ENOUGH]
            if not runs:
                self._works = False
                return None
            hottest = max(runs, key=lambda run: run.requests * len(run.ids))
            hottest.requests = 0
            return hottest

    def _heal(self, run: Run) -> None:
        loaded = self._corpus.loaded
        row = loaded.architecture.values_per_token * loaded.dtype.itemsize
        if len(run.ids) * row > self._budget // 2:
            return
        for at, chunk in enumerate(run.chunks):
            if self._corpus.sinks.usable_fingerprint().weights != run.sink.fingerprint.weights:
                return
            if not self._is_exact(run, chunk):
                start = run.chunks[at - 1].stop if at else 0
                is_version = 0 < at < run.chain and chunk.first < chunk.end
                compute = partial(self._compute, run, start, at, observed=is_version)
                cache, paid = self._idle.run(compute, chunk.stop)
                self.tokens += chunk.stop - start
                model, rows = run.sink.fingerprint, (cache.keys, cache.values)
                self._history.keep_exact(run.ids[: chunk.stop], rows, model, run.begun)
                if is_version:
                    self._versions.keep(version_in(run, at, paid), rows)
        with self._lock:
            for chunk in run.chunks:
                part = self._runs.get(_key(run.ids[: chunk.stop], run.sink))
                if part is not None:  # computed with the whole run
                    part.requests = 0

    def _is_exact(self, run: Run, chunk: RunChunk) -> bool:
        """Whether the tree has the chunk's exact rows, restored from the store if necessary."""
        path = run.ids[: chunk.stop]
        if self._history.exact_rows(path, run.sink.fingerprint).exact == chunk.stop:
            return True
        return self._versions.restore(
            chunk.text, path[: chunk.end], chunk.first, run.sink.fingerprint, run.begun
        )

    def _compute(
        self, run: Run, start: int, last: int, *, observed: bool
    ) -> tuple[SplicedCache, Paid]:
        """Compute a run's rows from ``start`` to the end of its chunk ``last``.

        The rows before ``start`` are exact rows of the tree.

        Returns
        -------
        tuple
            The cache, and ``[tokens, chunks]``: the attention of the computed rows to each chunk,
            mean over the layers, or zeros unless ``observed``.
        """
        loaded, chunks = self._corpus.loaded, run.chunks[: last + 1]
        ids = run.ids[: chunks[-1].stop]
        exact = self._history.exact_rows(ids, run.sink.fingerprint).between(0, start)
        layout = lay_out(Tokens(ids, np.zeros((len(ids), 2), np.int32)), ids[:0], (), exact)
        cache = splice(layout, None, loaded, 0)
        paid = np.zeros((len(ids), len(chunks)))
        observer = adds_attention(paid, chunks, loaded.device) if observed else None
        look_over(loaded)
        repair_forward(loaded, SubsetPass(ids, layout.fresh, cache, observer=observer))
        return cache, paid / loaded.architecture.layers

    # ---- ingestion

    def add_versions(
        self, texts: Sequence[str], missing: set[str], sink: Sink
    ) -> Iterator[tuple[str, int]]:
        """Store a version of each missing chunk, behind the chunks before it.

        The last chunks precede the first. A chunk gets none if it exceeds 4,096 tokens or the
        model's positions together with a neighbour.

        Parameters
        ----------
        texts
            Distinct stored chunks, in the order of their documents.
        missing
            Those without a version; a chunk is removed when it gets one.

        Yields
        ------
        tuple
            A chunk, and the bytes of its version in the store.

        Raises
        ------
        StoreError
            A version cannot be written; earlier ones are kept.
        """
        if len(texts) < 2:
            return
        self._corpus.refresh()
        for at, text in enumerate(texts):
            window = self._window(texts, missing, at, sink) if text in missing else None
            if window is None:
                continue
            run, first = window
            compute = partial(self._compute, run, 0, len(run.chunks) - 1, observed=True)
            (cache, paid), _ = self._corpus.passes.run(compute)
            self._corpus.sinks.require_unchanged(sink)
            rows = cache.keys, cache.values
            if not self._versions.is_stored:
                self._history.keep_exact(run.ids, rows, sink.fingerprint, run.begun)
            for number, chunk in enumerate(run.chunks[first:], first):
                missing.remove(chunk.text)
                yield chunk.text, self._versions.add(version_in(run, number, paid), rows)

    def _window(
        self, texts: Sequence[str], missing: Collection[str], at: int, sink: Sink
    ) -> tuple[Run, int] | None:
        """Return the longest run with versions from ``at`` on, and the number of chunks before."""
        for before, count in _WINDOWS:
            new = texts[at : at + min(count, len(texts) - 1)]
            new = list(takewhile(missing.__contains__, new))
            behind = [texts[each] for each in range(at - before, at) if texts[each] not in new]
            run = self._run_of([*dict.fromkeys(behind), *new], sink)
            if run is not None and len(run.ids) <= _WINDOW_TOKENS:
                return run, len(run.chunks) - len(new)
        return None

    def stop(self) -> None:
        """Stop before the next layer, for good."""
        self._idle.close()

    def drop(self, texts: Iterable[str] | None = None) -> None:
        """Drop the runs of some chunks; None drops all."""
        gone = set(texts or ())
        with self._lock:
            for key, run in list(self._runs.items()):
                if texts is None or not gone.isdisjoint(chunk.text for chunk in run.chunks):
                    del self._runs[key]


def _key(ids: IntArray, sink: Sink) -> tuple[int, Fingerprint]:
    return hash(ids.tobytes()), sink.fingerprint
