"""Contextual versions of chunks: which one serves a prompt, and where its rows are.

A version depends on the sink and the operator's chunks only: nothing that a user wrote is in it.
It serves any prompt that has its chunk; a prompt that begins with exactly its tokens takes its rows
as they are, after a restart too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ragkv.chunk.encode import unrotated
from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError
from ragkv.history.history import History
from ragkv.history.kept import ChunkVersions
from ragkv.history.node import Rows
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.tokens import IntArray
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.stored_versions import StoredVersions
from ragkv.store.types import TierUse
from ragkv.store.version import PlacedVersion, Version, digest_of_path

_log = logging.getLogger(__name__)


class Versions:
    """The versions of one model's chunks.

    Parameters
    ----------
    history
        Has their rows within its budget.
    is_chunk
        Whether a text is a chunk of the store.
    lossless
        Whether stored rows are, bit by bit, those that were encoded.
    writable
        Whether the store can keep them too.
    """

    def __init__(
        self,
        loaded: ReusableModel,
        store: ChunkStore,
        history: History,
        is_chunk: Callable[[str], bool],
        *,
        lossless: bool,
        writable: bool,
    ) -> None:
        self.kept = ChunkVersions()
        self._loaded, self._store, self._history = loaded, store, history
        self._is_chunk, self._lossless = is_chunk, lossless
        self._stored = StoredVersions(store)
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
            self._ingested = {text for text in self._ingested if self._is_chunk(text)}
        self.kept.drop_unknown(self._is_chunk)

    def in_use(self) -> tuple[TierUse, ...]:
        """Return how many chunks they served, once they did; their bytes are the tree's."""
        return (TierUse("versions", 0, self.kept.hits),) if self.kept.hits else ()

    # ---- in a prompt

    def take(self, text: str, before: Sequence[str], model: Fingerprint) -> PlacedVersion | None:
        """Return the version of lowest cache fix overhead; None where the entry has no higher one.

        Parameters
        ----------
        before
            The chunks before it in the prompt, each once.
        model
            The fingerprint of the chunk's entry.
        """
        self._of(text, model)
        while taken := self.kept.take(text, model, before, self._is_chunk):
            version, overhead = taken
            rows = self._rows_of(version)
            if rows is not None:
                return PlacedVersion.of(version, rows, overhead)
            self.kept.discard(version)
        return None

    def _rows_of(self, version: Version) -> ChunkKV | None:
        """Return a version's rows, keys not rotated, from the tree or the store."""
        if version.place is not None:
            own = self._history.exact_chunk(version.text, *version.place, version.fingerprint)
            if own is not None:
                return own
        stored = self._stored.read(version)
        if stored is None or not self._lossless:
            return stored
        return unrotated(stored, version.first, self._loaded)

    def restore(
        self, text: str, path: IntArray, first: int, model: Fingerprint, begun: float
    ) -> bool:
        """Bring a chunk's stored rows at the end of a path back; return whether there were any.

        A codec that changed them makes them inexact: there are none then.
        """
        versions = self._of(text, model) if self._lossless else []
        digest = digest_of_path(path) if versions else ""
        found = [each for each in versions if each.path == digest and not each.has_expired]
        rows = self._stored.read(found[0]) if found else None
        if rows is None or len(rows) != len(path) - first:
            return False
        self._history.keep_exact(path, (rows.keys, rows.values), model, begun, first)
        return True

    def _of(self, text: str, model: Fingerprint) -> list[Version]:
        """Return a chunk's versions; the store is read once."""
        known = self.kept.of(text, model)
        if known is None:
            for version in self._stored.of(text, model):
                self.kept.add(version)
            known = self.kept.of(text, model)
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
        times = [self._store.expiry(text) for text in texts]
        expires_at = min((time for time in times if time is not None), default=None)
        version = replace(version, expires_at=expires_at)
        evicted = self.kept.add(version)
        if not self._writable:
            return
        own = ChunkKV(version.text, place.ids[version.first :], place.offsets, *rows)
        if not self._lossless:  # codecs are made for keys without rotation
            own = unrotated(own, version.first, self._loaded)
        try:
            self._stored.put(version, own)
            for each in evicted:
                self._stored.delete(each)
        except StoreError as error:
            _log.warning("a version was not stored: %s", error)

    # ---- details

    def _is_ingested(self, text: str) -> bool:
        """Whether the operator gave the chunk: here, or to any process with its document's name."""
        if text not in self._ingested and not self._store.documents(text):
            return False
        if not self._is_chunk(text):
            return False
        with self._noting:
            self._ingested.add(text)
        return True
