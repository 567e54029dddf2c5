"""The versions of a namespace's chunks: which there are, and which one serves a prompt."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragkv.model.fingerprint import Fingerprint
from ragkv.store.version import NO_CONTEXT, Version

VERSIONS_PER_CHUNK = 5
"""M: at most so many versions of one chunk."""

MOST_CHUNKS = 4096
"""Chunks whose versions are known here; those of the least recently used one are forgotten."""

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
    """Up to M versions of each chunk (Cache-Craft, section 3.3), without their rows.

    Threads may share it.
    """

    def __init__(self, per_chunk: int = VERSIONS_PER_CHUNK) -> None:
        self._per_chunk = per_chunk
        self._lock = threading.Lock()
        self._by_chunk = OrderedDict[tuple[str, Fingerprint], list[_UsedVersion]]()
        self._added = 0
        self.hits = 0
        """Versions that were taken."""

    def __len__(self) -> int:
        """Return the number of versions."""
        with self._lock:
            return sum(map(len, self._by_chunk.values()))

    def of(self, text: str, fingerprint: Fingerprint) -> list[Version] | None:
        """Return a chunk's versions; None where neither they nor the chunk were named here yet."""
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
        """Return the chunk's version of lowest CFO, and the CFO.

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

    def add(self, version: Version) -> list[Version]:
        """Keep a version, in place of one of the same context; return those that M evicted."""
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
        """Drop the versions of chunks, or behind chunks, that are not stored any more."""
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
