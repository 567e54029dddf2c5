"""Contextual versions of chunks: which prompts use them, and which ask for new ones.

A version is computed from the sink and chunks alone, in a pass of its own: what a prompt says
beside them is not in it. Prompts ask for versions, and they are computed in the background. A
prompt decides at most which there are, and only where the operator's chunks follow one another
from the sink on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile

import numpy as np

from ragkv.chunk.kv import LayeredKV
from ragkv.engine.capture import compute_versions, joined_ids
from ragkv.engine.corpus import Corpus, Sink
from ragkv.engine.idle import IdleWork
from ragkv.engine.plan import Located, LocatedEntry, Plan
from ragkv.engine.request import Request
from ragkv.engine.requests import Cancelled, RequestQueue
from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import TierUse
from ragkv.store.versions.kept import ChunkVersions
from ragkv.store.versions.stored import StoredVersions
from ragkv.store.versions.version import PlacedVersion, Version

_log = logging.getLogger(__name__)
MOST_WANTED = 16
"""Prompts whose chunks' versions are yet to be computed; another takes the oldest one's place."""


class Versions:
    """The versions of one model's chunks.

    Parameters
    ----------
    requests
        Requests of the model, to which computing versions of their chunks gives way.
    budget
        Bytes of all versions in memory; 0 keeps none, in the store neither.
    writable
        Whether the store can keep them, too.
    """

    def __init__(
        self, corpus: Corpus, requests: RequestQueue, budget: int, *, writable: bool
    ) -> None:
        self.kept = ChunkVersions(budget)
        self._stored = StoredVersions(corpus.store)
        self._corpus = corpus
        self._idle = IdleWork(corpus.loaded, requests)
        self._writable = writable
        self._asked = set[tuple[str, Fingerprint]]()  # of these the store's are known
        self._ingested = set[str]()  # the operator's chunks
        self._wanted = dict[tuple[tuple[str, ...], Fingerprint], Sink]()  # chunks in a row
        self._computes = False
        self._noting = threading.Lock()

    # ---- the operator's chunks

    def note_ingested(self, texts: Iterable[str]) -> None:
        """Note chunks that the operator gave: versions are of them, and behind them, alone."""
        with self._noting:
            self._ingested.update(text.strip() for text in texts)

    def drop_deleted(self) -> None:
        """Drop what depends on chunks that are not stored any more."""
        with self._noting:
            self._corpus.refresh()
            self._ingested = {text for text in self._ingested if self._is_stored(text)}
            self._asked = {each for each in self._asked if self._is_stored(each[0])}
        self.kept.drop_unknown(self._is_stored)

    def in_use(self) -> tuple[TierUse, ...]:
        """Return the bytes that are kept and how many chunks they served, once there are any."""
        used = TierUse("versions", self.kept.nbytes, self.kept.hits)
        return (used,) if used.nbytes or used.hits else ()

    def clear(self) -> None:
        """Drop all versions from memory."""
        with self._noting:
            self._asked.clear()
            self._wanted.clear()
        self.kept.clear()

    # ---- in a prompt

    def place(self, request: Request, located: Located) -> Located:
        """Replace entries by the chunks' versions of lowest cache fix overhead."""
        sink = located.sink
        if sink is None or not self._serves(request):
            return located
        begin = _sink_end(located, sink)
        known = [span for span in located.known or () if span.start >= begin]
        entries: list[LocatedEntry] = []
        for entry, start, end in located.entries:
            before = list(dict.fromkeys(span.text for span in known if span.end <= start))
            version = self._taken(entry, before, sink) if before else None
            entries.append((version or entry, start, end))
        return replace(located, entries=tuple(entries))

    def _taken(self, entry: LayeredKV, before: Sequence[str], sink: Sink) -> PlacedVersion | None:
        """Return the version to place instead of an entry, its rows read where they are stored."""
        self._ask_store(entry.text, sink)
        while taken := self.kept.take(entry.text, sink.fingerprint, before, self._is_stored):
            version, overhead = taken
            rows = version.entry
            if rows is None:
                rows = self._stored.read(version)
                if rows is not None:
                    self.kept.fill(version, rows)
            if rows is not None and np.array_equal(rows.token_ids, entry.token_ids):
                return PlacedVersion(version, rows, overhead)
            self.kept.discard(version)
        return None

    def _ask_store(self, text: str, sink: Sink) -> None:
        """Learn once which versions of a chunk are stored."""
        with self._noting:
            if (text, sink.fingerprint) in self._asked:
                return
            self._asked.add((text, sink.fingerprint))
        for version in self._stored.of(text, sink.fingerprint):
            self.kept.add(version, stored=True)

    def want(self, request: Request, plan: Plan) -> bool:
        """Note the prompt's chunks, if versions of them are missing.

        Return whether somebody has to call :meth:`compute_wanted`; once for all that is noted.
        """
        sink = plan.located.sink
        if sink is None or not self._serves(request):
            return False
        chain = tuple(self._up_to_missing(self._chain(plan, sink), sink))
        if not chain:
            return False
        with self._noting:
            self._wanted[chain, sink.fingerprint] = sink
            while len(self._wanted) > MOST_WANTED:
                del self._wanted[next(iter(self._wanted))]
            computes, self._computes = self._computes, True
        return not computes

    def _chain(self, plan: Plan, sink: Sink) -> list[str]:
        """Return the chunks that follow the whole sink and one another.

        Up to one that is cut off, or repeated, or behind other text than separators without a
        letter or digit.
        """
        located = plan.located
        if plan.spliced.layout.sink < len(sink.ids):
            return []
        chain, end = list[str](), _sink_end(located, sink)
        for span in located.known or ():
            gap = located.text[end : span.start]
            whole = span.start >= end and span.end - span.start == len(span.text)
            if not whole or span.text in chain or any(map(str.isalnum, gap)):
                break
            chain.append(span.text)
            end = span.end
        return chain

    # ---- in the background

    def compute_wanted(self) -> None:
        """Compute and keep what was noted, one prompt after another, while no request runs."""
        try:
            with suppress(Cancelled):
                while wanted := self._next_wanted():
                    self._compute(*wanted)
        finally:
            with self._noting:
                self._computes = False

    def _next_wanted(self) -> tuple[Sequence[str], Sink] | None:
        with self._noting:
            for chain, model in self._wanted:
                return chain, self._wanted.pop((chain, model))
            self._computes = False
            return None

    def _compute(self, chain: Sequence[str], sink: Sink) -> None:
        texts = self._up_to_missing(list(takewhile(self._is_ingested, chain)), sink)
        for version in self._versions(texts, sink) if texts else ():
            if not self.kept.contains(version.text, sink.fingerprint, version.prefix):
                self._keep(version)
        self.drop_deleted()
        _log.debug("%d versions in context, %d bytes", len(self.kept), self.kept.nbytes)

    def stop(self) -> None:
        """Compute no more of what is wanted."""
        self._idle.close()

    def _versions(self, texts: Sequence[str], sink: Sink) -> list[Version]:
        """Compute the versions of chunks behind one another; none where one was deleted."""
        found = self._corpus.open(texts, sink)
        entries = [each.entry for each in found if each.entry is not None]
        loaded = self._corpus.loaded
        limits = loaded.positions, loaded.architecture.position_limit
        most = min((n for n in limits if n is not None), default=1e9)
        tokens = len(joined_ids(sink, entries))
        if len(entries) < len(texts) or tokens > most:
            return []
        expiries = [each.expires_at for each in found]
        made = self._idle.run(partial(compute_versions, loaded, sink, entries, expiries), tokens)
        changed = self._corpus.usable_fingerprint().weights != sink.fingerprint.weights
        return [] if changed else made

    def _keep(self, version: Version) -> None:
        """Keep a version here and in the store; what it evicts leaves both."""
        stored = False
        try:
            if self._writable:
                stored = self._stored.put(version) > 0
            for evicted in self.kept.add(version, stored=stored):
                self._stored.delete(evicted)
        except StoreError as error:
            _log.warning("a version was not stored: %s", error)
            self.kept.add(version)

    # ---- details

    def _serves(self, request: Request) -> bool:
        return request.uses_versions and self.kept.budget > 0

    def _up_to_missing(self, chain: list[str], sink: Sink) -> list[str]:
        """Return the chunks up to the last that has no version behind those before it."""
        kept, model = self.kept, sink.fingerprint
        missing = [
            at for at in range(1, len(chain)) if not kept.contains(chain[at], model, chain[:at])
        ]
        return chain[: missing[-1] + 1] if missing else []

    def _is_ingested(self, text: str) -> bool:
        """Whether the operator gave the chunk: here, or to any process with its document's name."""
        if text not in self._ingested and not self._corpus.store.documents(text):
            return False
        with self._noting:
            self._ingested.add(text)
        return True

    def _is_stored(self, text: str) -> bool:
        """Whether a chunk is stored, by the changes that were read last."""
        return self._corpus.knows(text, refresh=False)


def _sink_end(located: Located, sink: Sink) -> int:
    """Return where the sink ends in the prompt's text."""
    return int(located.tokens.offsets[: len(sink.ids), 1].max(initial=0))
