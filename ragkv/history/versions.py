"""Contextual versions of chunks: the choice of one for a prompt, and their rows.

A version depends only on the sink and on ingested chunks; it contains no user's text. It serves any
prompt with its chunk. A prompt that begins with exactly its tokens uses its rows without repair,
also after a restart.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ragkv.chunk.encode import unrotated
from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError
from ragkv.history.history import History
from ragkv.history.node import Rows
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.tokens import IntArray
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.stored_versions import StoredVersions
from ragkv.store.types import TierUse
from ragkv.store.version import PlacedVersion, Version, digest_of_path

_log = logging.getLogger(__name__)

VERSIONS_PER_CHUNK = 5
"""Most versions of one chunk: M in the paper."""

MOST_CHUNKS = 4096
"""Most chunks with versions in memory; the least recently used chunk is removed first."""

_LEAST_OVERHEAD = 0.01
"""Least cache fix overhead (CFO) in ``1 / CFO``, the weight of a use."""


@dataclass(slots=True, eq=False)
class _UsedVersion:
    """A version, and f_r: the sum of ``1 / CFO`` over its capture and its uses.

    Of versions with equal f_r the oldest is evicted first.
    """

    version: Version
    number: int
    uses: float = 1.0

    @property
    def worth(self) -> tuple[float, int]:
        return self.uses, self.number


class ChunkVersions:
    """Up to M versions of each chunk (Cache-Craft, section 3.3), without their rows.

    It is thread-safe.
    """

    def __init__(self, per_chunk: int = VERSIONS_PER_CHUNK) -> None:
        self._per_chunk = per_chunk
        self._lock = threading.Lock()
        self._by_chunk = OrderedDict[tuple[str, Fingerprint], list[_UsedVersion]]()
        self._added = 0
        self.hits = 0
        """Number of uses of a version."""

    def __len__(self) -> int:
        """Return the number of versions."""
        with self._lock:
            return sum(map(len, self._by_chunk.values()))

    def of(self, text: str, fingerprint: Fingerprint) -> list[Version] | None:
        """Return a chunk's versions; None if the chunk is new here."""
        with self._lock:
            known = (text, fingerprint) in self._by_chunk
            own = [kept.version for kept in self._of(text, fingerprint)]
            return own if known else None

    def take(
        self,
        text: str,
        fingerprint: Fingerprint,
        before: Sequence[str],
        is_known: Callable[[str], bool],
    ) -> tuple[Version, float] | None:
        """Return the chunk's version of lowest CFO, and the CFO; None if there is no version.

        Rows behind any chunks are nearer to a prompt's than the entry's, which were computed
        directly behind the sink. Of equal versions, the one with the most common and then the
        fewest further chunks is returned.

        Parameters
        ----------
        before
            The distinct chunks before it in the prompt.
        is_known
            Whether a chunk is still stored; versions behind deleted chunks are not used.
        """
        common = set(before)

        def cost(kept: _UsedVersion) -> tuple[float, int, int]:
            prefix = kept.version.prefix
            return kept.version.overhead(before), -len(common.intersection(prefix)), len(prefix)

        with self._lock:
            usable = [
                (cost(kept), kept)
                for kept in self._of(text, fingerprint)
                if not kept.version.has_expired and all(map(is_known, kept.version.prefix))
            ]
            if not usable:
                return None
            (overhead, *_), best = min(usable, key=lambda each: each[0])
            best.uses += 1 / max(overhead, _LEAST_OVERHEAD)
            self.hits += 1
            return best.version, overhead

    def add(self, version: Version) -> list[Version]:
        """Add a version, or replace one with the same context; return the evicted ones."""
        with self._lock:
            own = self._of(version.text, version.fingerprint)
            own[:] = [kept for kept in own if not kept.version.is_alike(version)]
            dropped = []
            while len(own) >= self._per_chunk:
                least = min(own, key=lambda kept: kept.worth)
                own.remove(least)
                dropped.append(least.version)
            own.append(_UsedVersion(version, self._added))
            self._added += 1
            return dropped

    def discard(self, version: Version) -> None:
        """Drop a version."""
        with self._lock:
            own = self._of(version.text, version.fingerprint)
            own[:] = [kept for kept in own if kept.version is not version]

    def drop_unknown(self, is_known: Callable[[str], bool]) -> None:
        """Drop versions of deleted chunks and versions computed behind deleted chunks."""
        with self._lock:
            for key, own in list(self._by_chunk.items()):
                own[:] = [kept for kept in own if all(map(is_known, kept.version.prefix))]
                if not is_known(key[0]):
                    del self._by_chunk[key]

    def _of(self, text: str, fingerprint: Fingerprint) -> list[_UsedVersion]:
        own = self._by_chunk.setdefault((text, fingerprint), [])
        self._by_chunk.move_to_end((text, fingerprint))
        while len(self._by_chunk) > MOST_CHUNKS:
            self._by_chunk.popitem(last=False)
        return own


class Versions:
    """The versions of one model's chunks.

    Parameters
    ----------
    history
        Holds their rows within its budget.
    is_chunk
        Whether a text is a chunk of the store.
    lossless
        Whether stored rows equal the encoded ones bit by bit.
    writable
        Whether the store can keep versions.
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
        self.is_stored = writable and self._stored.keeps
        """Whether the store keeps versions; otherwise only the tree has their rows."""
        self.are_kept = self.is_stored or (store.backend.private and history.keeps)
        self._ingested = set[str]()  # chunks of ingestions
        self._noting = threading.Lock()

    def note_ingested(self, texts: Iterable[str]) -> None:
        """Record ingested chunks: versions are of and behind such chunks only."""
        with self._noting:
            self._ingested.update(text.strip() for text in texts)

    def drop_deleted(self) -> None:
        """Drop versions that depend on deleted chunks."""
        with self._noting:
            self._ingested = {text for text in self._ingested if self._is_chunk(text)}
        self.kept.drop_unknown(self._is_chunk)

    def in_use(self) -> tuple[TierUse, ...]:
        """Return the number of uses, if any; the bytes are counted by the tree."""
        return (TierUse("versions", 0, self.kept.hits),) if self.kept.hits else ()

    # ---- in a prompt

    def take(self, text: str, before: Sequence[str], model: Fingerprint) -> PlacedVersion | None:
        """Return the version of lowest cache fix overhead; None without a version.

        Parameters
        ----------
        before
            The distinct chunks before it in the prompt.
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
        """Load a chunk's stored rows at the end of a path; return whether there were any.

        Rows that a lossy codec has changed are not exact and are not loaded.
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
        """Return a chunk's versions, the first time from the store."""
        known = self.kept.of(text, model)
        if known is None:
            for version in self._stored.of(text, model):
                self.kept.add(version)
            known = self.kept.of(text, model)
        return known or []

    # ---- new ones

    def has(self, text: str, model: Fingerprint) -> bool:
        """Whether the chunk has a version that has not expired."""
        return not all(each.has_expired for each in self._of(text, model))

    def keep(self, version: Version, rows: Rows) -> None:
        """Keep a version as :meth:`add` does; log the errors of the store."""
        try:
            self.add(version, rows)
        except StoreError as error:
            _log.warning("a version was not stored: %s", error)

    def add(self, version: Version, rows: Rows) -> int:
        """Keep a version of ingested chunks, and evict others; return the bytes in the store.

        Parameters
        ----------
        rows
            The rows of its path at least, with rotated keys.

        Raises
        ------
        StoreError
        """
        texts, place = (*version.prefix, version.text), version.place
        if place is None or not all(map(self._is_ingested, texts)):
            return 0
        times = [self._store.expiry(text) for text in texts]
        expires_at = min((time for time in times if time is not None), default=None)
        version = replace(version, expires_at=expires_at)
        evicted = self.kept.add(version)
        if not self.is_stored:
            return 0
        span = slice(version.first, len(place.ids))
        keys, values = (each[:, :, span] for each in rows)
        own = ChunkKV(version.text, place.ids[span], place.offsets, keys, values)
        if not self._lossless:  # codecs expect unrotated keys
            own = unrotated(own, version.first, self._loaded)
        written = self._stored.put(version, own)
        for each in evicted:
            self._stored.delete(each)
        return written

    # ---- details

    def _is_ingested(self, text: str) -> bool:
        """Whether the chunk was ingested: in this process, or in any with a document's name."""
        if text not in self._ingested and not self._store.documents(text):
            return False
        if not self._is_chunk(text):
            return False
        with self._noting:
            self._ingested.add(text)
        return True
