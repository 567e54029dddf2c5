"""Contextual versions of chunks: which prompts take them, and where their rows are.

A version is a function of the sink and the operator's chunks alone: what a prompt says beside
them is not in it. It serves any prompt that has its chunk; one that begins with exactly its
tokens takes its rows as they are, after a restart too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import replace

from ragkv.chunk.encode import unrotated
from ragkv.chunk.kv import ChunkKV, KnownChunk, LayeredKV
from ragkv.engine.corpus import Corpus, Sink
from ragkv.engine.former import FormerPrompts
from ragkv.engine.plan import Located, LocatedEntry
from ragkv.engine.request import Request
from ragkv.errors import StoreError
from ragkv.prompt.tokens import IntArray
from ragkv.store.base import TierUse
from ragkv.store.prefixes.node import Rows
from ragkv.store.versions.kept import ChunkVersions
from ragkv.store.versions.stored import StoredVersions
from ragkv.store.versions.version import PlacedVersion, Version, digest_of_path

_log = logging.getLogger(__name__)


class Versions:
    """The versions of one model's chunks.

    Parameters
    ----------
    former
        Has their rows, as long as its budget allows.
    writable
        Whether the store can keep them, too.
    """

    def __init__(self, corpus: Corpus, former: FormerPrompts, *, writable: bool) -> None:
        self.kept = ChunkVersions()
        self._stored = StoredVersions(corpus.store)
        self._corpus = corpus
        self._former = former
        self._writable = writable and self._stored.keeps
        self._ingested = set[str]()  # the operator's chunks
        self._noting = threading.Lock()

    def note_ingested(self, texts: Iterable[str]) -> None:
        """Note chunks that the operator gave: versions are of them, and behind them, alone."""
        with self._noting:
            self._ingested.update(text.strip() for text in texts)

    def drop_deleted(self) -> None:
        """Drop what depends on chunks that are not stored any more."""
        with self._noting:
            self._ingested = {text for text in self._ingested if self._is_stored(text)}
        self.kept.drop_unknown(self._is_stored)

    def in_use(self) -> tuple[TierUse, ...]:
        """Return how many chunks they served, once they did; their bytes are the tree's."""
        return (TierUse("versions", 0, self.kept.hits),) if self.kept.hits else ()

    # ---- in a prompt

    def place(self, request: Request, located: Located) -> Located:
        """Replace entries by the chunks' versions of lowest cache fix overhead."""
        sink = located.sink
        if sink is None or not self._serves(request):
            return located
        begin = located.tokens.characters(len(sink.ids))
        known = [span for span in located.known or () if span.start >= begin]
        entries: list[LocatedEntry] = []
        for entry, start, end in located.entries:
            before = list(dict.fromkeys(span.text for span in known if span.end <= start))
            is_open = before and not isinstance(entry, KnownChunk)
            version = self._taken(entry, before, sink) if is_open else None
            entries.append((version or entry, start, end))
        return replace(located, entries=tuple(entries))

    def _taken(self, entry: LayeredKV, before: list[str], sink: Sink) -> PlacedVersion | None:
        """Return the version to place instead of an entry."""
        self._of(entry.text, sink)
        while taken := self.kept.take(entry.text, sink.fingerprint, before, self._is_stored):
            version, overhead = taken
            rows = self._rows_of(version, sink)
            if rows is not None:
                return PlacedVersion(version, rows, overhead)
            self.kept.discard(version)
        return None

    def _rows_of(self, version: Version, sink: Sink) -> ChunkKV | None:
        """Return a version's rows, keys not rotated: the tree's or the store's."""
        if version.place is not None:
            own = self._former.exact_chunk(version.text, *version.place, sink)
            if own is not None:
                return own
        stored = self._stored.read(version)
        if stored is None or not self._corpus.is_lossless:
            return stored
        return unrotated(stored, version.first, self._corpus.loaded)

    def restore(self, request: Request, located: Located) -> bool:
        """Bring stored rows of exactly this prompt's tokens back; return whether there were any."""
        sink, tokens = located.sink, located.tokens
        if sink is None or not self._serves(request) or self._former.is_beyond(tokens):
            return False
        begun, found = request.clock.started, False
        for span in located.known or ():
            if not located.has_rows(span):
                own = tokens.inside(span.start, span.end)
                path = tokens.ids[: own.stop]
                found |= self.restore_chunk(span.text, path, own.start, sink, begun)
        return found

    def restore_chunk(
        self, text: str, path: IntArray, first: int, sink: Sink, begun: float
    ) -> bool:
        """Bring a chunk's stored rows at the end of a path back; return whether there were any.

        None where the codec changed them: they are not exact.
        """
        versions = self._of(text, sink) if self._corpus.is_lossless else []
        digest = digest_of_path(path) if versions else ""
        found = [each for each in versions if each.path == digest and not each.has_expired]
        rows = self._stored.read(found[0]) if found else None
        if rows is None or len(rows) != len(path) - first:
            return False
        self._former.keep_exact(path, (rows.keys, rows.values), sink, begun, first=first)
        return True

    def _of(self, text: str, sink: Sink) -> list[Version]:
        """Return a chunk's versions; the store is read once."""
        known = self.kept.of(text, sink.fingerprint)
        if known is None:
            for version in self._stored.of(text, sink.fingerprint):
                self.kept.add(version)
            known = self.kept.of(text, sink.fingerprint)
        return known or []

    # ---- new ones

    def keep(self, version: Version, rows: Rows) -> None:
        """Keep a version of the operator's chunks, in the store too; what M evicts leaves it.

        Parameters
        ----------
        rows
            The chunk's, keys rotated at its place.
        """
        texts, place = (*version.prefix, version.text), version.place
        if place is None or not all(map(self._is_ingested, texts)):
            return
        times = [self._corpus.store.expiry(text) for text in texts]
        expires_at = min((time for time in times if time is not None), default=None)
        version = replace(version, expires_at=expires_at)
        evicted = self.kept.add(version)
        if not self._writable:
            return
        own = ChunkKV(version.text, place.ids[version.first :], place.offsets, *rows)
        if not self._corpus.is_lossless:  # codecs are made for keys without rotation
            own = unrotated(own, version.first, self._corpus.loaded)
        try:
            self._stored.put(version, own)
            for each in evicted:
                self._stored.delete(each)
        except StoreError as error:
            _log.warning("a version was not stored: %s", error)

    # ---- details

    def _serves(self, request: Request) -> bool:
        return request.uses_history and self._former.keeps

    def _is_ingested(self, text: str) -> bool:
        """Whether the operator gave the chunk: here, or to any process with its document's name."""
        if text not in self._ingested and not self._corpus.store.documents(text):
            return False
        if not self._is_stored(text):
            return False
        with self._noting:
            self._ingested.add(text)
        return True

    def _is_stored(self, text: str) -> bool:
        """Whether a chunk is stored, by the changes that were read last."""
        return self._corpus.knows(text, refresh=False)
