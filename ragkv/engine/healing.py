"""Healing: chunks that are requested together are computed exactly while no request runs.

A *run* is a prompt up to the end of one of its chunks. A run that was requested twice, or was
prefetched, is computed chunk by chunk, and every later prompt finds its rows in the tree. A stored
chunk behind only the sink and stored chunks is also a *version* (Cache-Craft): prompts that have it
behind different chunks can take the version instead of its entry, and the store keeps it. A version
contains no other text of a prompt.
"""

from __future__ import annotations

import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.forward import SubsetPass
from ragkv.attend.graphs import look_over, repair_forward
from ragkv.attend.observe import LayerCall, Observer, attention_to_groups
from ragkv.chunk.sinks import SINKS_KEPT, Sink
from ragkv.engine.plan import Located, Plan
from ragkv.engine.request import Request
from ragkv.history.history import History
from ragkv.history.node import Rows
from ragkv.history.versions import Versions
from ragkv.ingest.corpus import Corpus
from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.chat import TokenIds
from ragkv.prompt.render import Rendered
from ragkv.prompt.tokens import IntArray, Tokens, tokenize
from ragkv.schedule.beside import IdleWork
from ragkv.schedule.requests import Cancelled, RequestQueue
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Layout, lay_out
from ragkv.splice.place import splice
from ragkv.store.version import PathSpan, Version, context_impact, digest_of_path

Paid = npt.NDArray[np.float64]
MOST_RUNS = 512
"""Number of runs whose requests are counted: the most recently requested ones."""
ENOUGH = 2
"""Number of requests after which a run is healed."""
_LONGEST_SEPARATOR = 32
_GAP = "\n\n"
"""Text between prefetched chunks, until a prompt shows a different separator."""


class RunChunk(NamedTuple):
    """A chunk of a run.

    Attributes
    ----------
    text
        The chunk's text.
    first, end
        Its tokens, without those that extend beyond it.
    stop
        End of the last token that has a character of it.
    offsets
        ``[tokens, 2]`` characters of its text that its tokens cover.
    """

    text: str
    first: int
    end: int
    stop: int
    offsets: IntArray


@dataclass(slots=True, eq=False)
class _Run:
    """Chunks behind a sink. The first ``chain`` of them follow it, and one another, directly."""

    ids: IntArray
    chunks: tuple[RunChunk, ...]
    chain: int
    sink: Sink
    begun: float  # chunks that were deleted later are not kept
    requests: int = 0


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
        self._runs = OrderedDict[tuple[int, Fingerprint], _Run]()
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
        chain = _chain(located, sink, chunks) if usual else 0
        if chain == len(chunks):
            first, *others = located.known or ()
            gap = located.text[first.end : others[0].start] if others else _GAP
            head = replace(located.rendered, text=located.text[: first.start])
            self._frames[sink.rendered.text] = head, gap
            while len(self._frames) > SINKS_KEPT:
                del self._frames[next(iter(self._frames))]
        return self._count(_Run(tokens.ids, chunks, chain, sink, request.clock.started, 1))

    def prefetch(self, texts: Sequence[str], sink: Sink) -> bool:
        """Request the run of chunks in this order; return as :meth:`note` does."""
        begun = time.perf_counter()
        frame = self._frames.get(sink.rendered.text)
        head, gap = frame or (sink.rendered, _GAP)
        text, spans = head.text, list[tuple[str, int]]()
        for each in dict.fromkeys(texts):
            text += gap if spans else ""
            spans.append((each, len(text)))
            text += each
        rendered = Rendered(text, head.add_special_tokens)
        tokens = tokenize(rendered, self._corpus.loaded.tokenizer)
        chunks = tuple(_chunk(tokens, each, start) for each, start in spans)
        limit = self._corpus.loaded.positions
        fits = limit is None or len(tokens) < limit
        fits = fits and not len(self._corpus.loaded.without_embedding(tokens.ids))
        if not fits or self._history.is_beyond(len(tokens)):
            return False
        self._corpus.refresh()
        if not all(map(self._corpus.has, texts)):
            return False
        run = _Run(tokens.ids, chunks, len(chunks), sink, begun, ENOUGH)
        return self._budget > 0 and self._count(run)

    def _count(self, whole: _Run) -> bool:
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

    def _next(self) -> _Run | None:
        with self._lock:
            runs = [run for run in self._runs.values() if run.requests >= ENOUGH]
            if not runs:
                self._works = False
                return None
            hottest = max(runs, key=lambda run: run.requests * len(run.ids))
            hottest.requests = 0
            return hottest

    def _heal(self, run: _Run) -> None:
        loaded = self._corpus.loaded
        row = loaded.architecture.values_per_token * loaded.dtype.itemsize
        if len(run.ids) * row > self._budget // 2:
            return
        for at, chunk in enumerate(run.chunks):
            if self._corpus.sinks.usable_fingerprint().weights != run.sink.fingerprint.weights:
                return
            if not self._is_exact(run, chunk):
                cache, paid = self._idle.run(partial(self._compute, run, at), chunk.stop)
                self._keep(run, at, (cache.keys, cache.values), paid)
        with self._lock:
            for chunk in run.chunks:
                part = self._runs.get(_key(run.ids[: chunk.stop], run.sink))
                if part is not None:  # computed with the whole run
                    part.requests = 0

    def _is_exact(self, run: _Run, chunk: RunChunk) -> bool:
        """Whether the tree has the chunk's exact rows, restored from the store if necessary."""
        path = run.ids[: chunk.stop]
        if self._history.exact_rows(path, run.sink.fingerprint).exact == chunk.stop:
            return True
        return self._versions.restore(
            chunk.text, path[: chunk.end], chunk.first, run.sink.fingerprint, run.begun
        )

    def _compute(self, run: _Run, at: int) -> tuple[SplicedCache, Paid | None]:
        """Compute one chunk of a run behind the exact rows of those before it.

        Returns
        -------
        tuple
            The cache, and for a version ``[tokens, chunks]`` the attention of its tokens to each
            chunk up to itself, summed over the layers.
        """
        loaded, chunk = self._corpus.loaded, run.chunks[at]
        start = run.chunks[at - 1].stop if at else 0
        ids = run.ids[: chunk.stop]
        exact = self._history.exact_rows(ids, run.sink.fingerprint).between(0, start)
        layout = lay_out(Tokens(ids, np.zeros((len(ids), 2), np.int32)), ids[:0], (), exact)
        cache = splice(layout, None, loaded, 0)
        paid: Paid | None = None
        observer: Observer | None = None
        if 0 < at < run.chain and chunk.first < chunk.end:
            paid, observer = _attention(run.chunks[: at + 1], layout, loaded.device)
        look_over(loaded)
        repair_forward(loaded, SubsetPass(ids, layout.fresh, cache, observer=observer))
        self.tokens += len(layout.fresh)
        return cache, paid

    def _keep(self, run: _Run, at: int, rows: Rows, paid: Paid | None) -> None:
        """Keep a chunk's rows, and its version; the model is free meanwhile."""
        chunk = run.chunks[at]
        model = run.sink.fingerprint
        self._history.keep_exact(run.ids[: chunk.stop], rows, model, run.begun)
        if paid is not None:
            own = rows[0][:, :, chunk.first : chunk.end], rows[1][:, :, chunk.first : chunk.end]
            layers = self._corpus.loaded.architecture.layers
            self._versions.keep(_version(run, at, paid / layers), own)

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


def chunks_of(located: Located) -> Iterable[RunChunk]:
    """Yield the prompt's chunks in order, up to the first that is not whole."""
    end = 0
    for span in located.known or ():
        if span.end - span.start != len(span.text):
            return
        chunk = _chunk(located.tokens, span.text, span.start)
        if chunk.first < end or chunk.end <= chunk.first:
            return
        end = chunk.stop
        yield chunk


def _chunk(tokens: Tokens, text: str, start: int) -> RunChunk:
    """Return the chunk at a character of the prompt."""
    end = start + len(text)
    own, stop = tokens.inside(start, end), tokens.touching(start, end).stop
    return RunChunk(text, own.start, own.stop, stop, tokens.offsets[own] - np.int32(start))


def _chain(located: Located, sink: Sink, chunks: Sequence[RunChunk]) -> int:
    """Count the first chunks that follow the whole sink and one another.

    A repeated chunk ends the chain, and so does any text between chunks except a separator: a few
    visible characters of punctuation, which carry no content.
    """
    ids = located.tokens.ids[: len(sink.ids)]
    if not np.array_equal(ids, sink.ids):
        return 0
    end = located.tokens.characters(len(sink.ids))
    seen = set[str]()
    for count, (chunk, span) in enumerate(zip(chunks, located.known or (), strict=False)):
        gap = located.text[end : span.start]
        if not _is_separator(gap) or chunk.text in seen:
            return count
        seen.add(chunk.text)
        end = span.end
    return len(chunks)


def _is_separator(gap: str) -> bool:
    kinds = {unicodedata.category(each)[0] for each in "".join(gap.split())}
    return len(gap) <= _LONGEST_SEPARATOR and kinds <= {"P"}


def _attention(
    chunks: Sequence[RunChunk], layout: Layout, device: torch.device
) -> tuple[Paid, Observer]:
    """Return the last chunk's attention to each chunk, and the observer that adds each layer's."""
    member = torch.zeros(len(layout), len(chunks), dtype=torch.float32, device=device)
    for group, each in enumerate(chunks):
        member[each.first : each.end, group] = 1.0
    own = (layout.fresh >= chunks[-1].first) & (layout.fresh < chunks[-1].end)
    paid = np.zeros((int(own.sum()), len(chunks)))

    def observe(call: LayerCall) -> None:
        paid[:] += attention_to_groups(call, member).cpu().numpy()[own]

    return paid, observe


def _version(run: _Run, at: int, paid: Paid) -> Version:
    """Return the version of a run's chunk; ``paid`` is its tokens' attention."""
    chunk, before = run.chunks[at], run.chunks[:at]
    between = np.zeros((at + 1, at + 1))
    between[at] = paid.sum(axis=0)
    sizes = np.array([each.end - each.first for each in run.chunks[: at + 1]])
    order = np.argsort(-paid[:, :at].sum(axis=1), kind="stable")
    ids = run.ids[: chunk.end]
    return Version(
        chunk.text,
        run.sink.fingerprint,
        tuple(each.text for each in before),
        between[at, :at].copy(),
        float(between[at, at]),
        float(context_impact(between, sizes)[at]),
        np.argsort(order, kind="stable"),
        digest_of_path(ids),
        chunk.first,
        place=PathSpan(ids, chunk.offsets),
    )
