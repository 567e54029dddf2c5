"""The versions of a namespace's chunks, in memory, within a budget.

Those that are in a store, too, are known here with or without their rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.versions.version import NO_CONTEXT, Version

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
    stored: bool
    uses: float = 1.0

    @property
    def worth(self) -> tuple[float, int]:
        return self.uses, self.number


class ChunkVersions:
    """Up to M versions of each chunk, and up to a budget of all (Cache-Craft, section 3.3).

    The version of lowest worth is evicted: of the chunk where it has too many, else of all. Where
    a store has the rows, too, those alone are dropped for the budget. Threads may share it.

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
                kept.version.prefix == tuple(prefix) and not kept.version.has_expired
                for kept in self._of(text, fingerprint)
            )

    def take(
        self,
        text: str,
        fingerprint: Fingerprint,
        before: Sequence[str],
        is_known: Callable[[str], bool],
    ) -> tuple[Version, float] | None:
        """Return the chunk's version of lowest CFO, perhaps without its rows, and the CFO.

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

        def cost(kept: _UsedVersion) -> tuple[float, int, int]:
            prefix = kept.version.prefix
            return kept.version.overhead(before), -len(common.intersection(prefix)), len(prefix)

        with self._lock:
            usable = [
                (cost(kept), kept)
                for kept in self._of(text, fingerprint)
                if not kept.version.has_expired and all(map(is_known, kept.version.prefix))
            ]
            better = [each for each in usable if each[0][0] < NO_CONTEXT]
            if not better:
                return None
            (overhead, *_), best = min(better, key=lambda each: each[0])
            best.uses += 1 / max(overhead, _LEAST_OVERHEAD)
            self.hits += 1
            return best.version, overhead

    def add(self, version: Version, *, stored: bool = False) -> list[Version]:
        """Keep a version and return those that M evicted though a store has them.

        It replaces one of the same context, unless its rows are missing. The former model's are
        dropped. Without its rows it is kept whatever the budget is.

        Parameters
        ----------
        stored
            Whether a store has it.
        """
        weights = version.fingerprint.weights
        with self._lock:
            for kept in list(self._all()):
                other = kept.version
                if other.is_alike(version) and version.entry is None and not other.has_expired:
                    return []
                if (
                    other.fingerprint.weights != weights
                    or other.has_expired
                    or other.is_alike(version)
                ):
                    self._remove(kept)
            if version.nbytes > self.budget and not stored:
                return []
            dropped = []
            own = self._by_text.get(version.text, [])
            while len(own) >= self._per_chunk:
                least = min(own, key=lambda kept: kept.worth)
                dropped += [least.version] if least.stored else []
                self._remove(least)
            added = _UsedVersion(version, self._added, stored)
            self._by_text.setdefault(version.text, []).append(added)
            self._added += 1
            self._nbytes += version.nbytes
            self._make_room(added)
            return dropped

    def fill(self, version: Version, rows: ChunkKV) -> None:
        """Keep the rows of a version, as far as the budget allows."""
        with self._lock:
            for kept in self._by_text.get(version.text, ()):
                if kept.version is version and version.entry is None:
                    self._set(kept, rows)
                    self._make_room(kept)
                    return

    def discard(self, version: Version) -> None:
        """Drop a version, whether its rows are here or not."""
        with self._lock:
            for kept in self._by_text.get(version.text, [])[:]:
                if kept.version.is_alike(version):
                    self._remove(kept)

    def drop_unknown(self, is_known: Callable[[str], bool]) -> None:
        """Drop the versions of chunks, or behind chunks, that are not stored any more."""
        with self._lock:
            for kept in list(self._all()):
                if not all(map(is_known, (kept.version.text, *kept.version.prefix))):
                    self._remove(kept)

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._by_text.clear()
            self._nbytes = 0

    def _of(self, text: str, fingerprint: Fingerprint) -> Iterator[_UsedVersion]:
        own = self._by_text.get(text, ())
        return (kept for kept in own if kept.version.fingerprint == fingerprint)

    def _all(self) -> Iterator[_UsedVersion]:
        return (kept for versions in self._by_text.values() for kept in versions)

    def _make_room(self, added: _UsedVersion) -> None:
        """Drop the rows of what is worth least for those that came."""
        others = [
            each for each in self._all() if each is not added and each.version.entry is not None
        ]
        while self._nbytes > self.budget and added.version.entry is not None:
            least = added
            if others and added.version.nbytes <= self.budget:
                least = min(others, key=lambda each: each.worth)
                others.remove(least)
            self._drop_rows(least)

    def _drop_rows(self, kept: _UsedVersion) -> None:
        if kept.stored:
            self._set(kept, None)
        else:
            self._remove(kept)

    def _set(self, kept: _UsedVersion, rows: ChunkKV | None) -> None:
        self._nbytes -= kept.version.nbytes
        kept.version = replace(kept.version, entry=rows)
        self._nbytes += kept.version.nbytes

    def _remove(self, kept: _UsedVersion) -> None:
        text = kept.version.text
        self._by_text[text].remove(kept)
        self._nbytes -= kept.version.nbytes
        if not self._by_text[text]:
            del self._by_text[text]
