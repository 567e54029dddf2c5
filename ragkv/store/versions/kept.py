"""The versions of a namespace's chunks, in memory, within a budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ragkv.model.fingerprint import Fingerprint
from ragkv.store.versions.overhead import NO_CONTEXT
from ragkv.store.versions.version import PlacedVersion, Version

VERSIONS_PER_CHUNK = 5
"""M: at most so many versions of one chunk."""

_LEAST_OVERHEAD = 0.01
"""A use counts as ``1 / CFO``, but never for more than with this CFO."""


@dataclass(slots=True, eq=False)
class _UsedVersion:
    """A version and f_r: the sum of ``1 / CFO`` over its uses, its capture among them.

    Of equal ones the older is worth less.
    """

    version: Version
    number: int
    uses: float = 1.0

    @property
    def worth(self) -> tuple[float, int]:
        return self.uses, self.number


class ChunkVersions:
    """Up to M versions of each chunk, and up to a budget of all (Cache-Craft, section 3.3).

    The version of lowest worth is evicted: of the chunk where it has too many, else of all.
    Threads may share it.

    Parameters
    ----------
    budget
        Bytes. A larger version is not kept.
    per_chunk
        M.
    """

    def __init__(self, budget: int, per_chunk: int = VERSIONS_PER_CHUNK) -> None:
        self.budget = budget
        self._per_chunk = per_chunk
        self._lock = threading.Lock()
        self._by_text: dict[str, list[_UsedVersion]] = {}
        self._nbytes = 0
        self._added = 0
        self.hits = 0
        """Versions that were taken."""

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._nbytes

    def __len__(self) -> int:
        """Return the number of versions."""
        with self._lock:
            return sum(map(len, self._by_text.values()))

    def contains(self, text: str, fingerprint: Fingerprint, prefix: Sequence[str]) -> bool:
        """Whether there is a version of the chunk behind exactly these chunks."""
        with self._lock:
            return any(
                version.prefix == tuple(prefix) and not version.has_expired
                for version in self._of(text, fingerprint)
            )

    def take(
        self,
        text: str,
        fingerprint: Fingerprint,
        before: Sequence[str],
        is_known: Callable[[str], bool],
    ) -> PlacedVersion | None:
        """Return the chunk's version of lowest CFO, and count a use of it.

        None where the entry, which was computed behind the sink alone, has no higher one. Of
        equal versions, that is returned which has most chunks in common and fewest others.

        Parameters
        ----------
        before
            The chunks before it in the prompt, each once.
        is_known
            Whether a chunk is still stored: versions behind others are not used.
        """
        common = set(before)
        with self._lock:
            found = [
                PlacedVersion(version, version.overhead(before))
                for version in self._of(text, fingerprint)
                if not version.has_expired and all(map(is_known, version.prefix))
            ]
            if not found:
                return None

            def cost(placed: PlacedVersion) -> tuple[float, int, int]:
                prefix = placed.version.prefix
                return placed.overhead, -len(common.intersection(prefix)), len(prefix)

            best = min(found, key=cost)
            if best.overhead >= NO_CONTEXT:
                return None
            self.hits += 1
            for kept in self._by_text[text]:
                if kept.version is best.version:
                    kept.uses += 1 / max(best.overhead, _LEAST_OVERHEAD)
            return best

    def add(self, version: Version) -> None:
        """Keep a version; it replaces one of the same context. The former model's are dropped."""
        text, weights = version.entry.text, version.fingerprint.weights
        with self._lock:
            self._keep_if(
                lambda other: (
                    other.fingerprint.weights == weights
                    and not other.has_expired
                    and not _is_alike(other, version)
                )
            )
            if version.nbytes > self.budget:
                return
            own = self._by_text.get(text, [])
            while len(own) >= self._per_chunk:
                self._remove(min(own, key=lambda kept: kept.worth))
            while self._nbytes + version.nbytes > self.budget:
                self._remove(min(self._all(), key=lambda kept: kept.worth))
            self._by_text.setdefault(text, []).append(_UsedVersion(version, self._added))
            self._added += 1
            self._nbytes += version.nbytes

    def drop_unknown(self, is_known: Callable[[str], bool]) -> None:
        """Drop the versions of chunks, or behind chunks, that are not stored any more."""
        with self._lock:
            self._keep_if(lambda version: all(map(is_known, (version.entry.text, *version.prefix))))

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._by_text.clear()
            self._nbytes = 0

    def _of(self, text: str, fingerprint: Fingerprint) -> Iterator[Version]:
        kept = (each.version for each in self._by_text.get(text, ()))
        return (version for version in kept if version.fingerprint == fingerprint)

    def _all(self) -> Iterator[_UsedVersion]:
        return (kept for versions in self._by_text.values() for kept in versions)

    def _keep_if(self, wanted: Callable[[Version], bool]) -> None:
        for kept in list(self._all()):
            if not wanted(kept.version):
                self._remove(kept)

    def _remove(self, kept: _UsedVersion) -> None:
        text = kept.version.entry.text
        self._by_text[text].remove(kept)
        self._nbytes -= kept.version.nbytes
        if not self._by_text[text]:
            del self._by_text[text]


def _is_alike(one: Version, other: Version) -> bool:
    """Whether both are of one chunk in one context."""
    return (one.entry.text, one.fingerprint, one.prefix) == (
        other.entry.text,
        other.fingerprint,
        other.prefix,
    )
