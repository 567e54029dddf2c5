"""The log line of a prompt's misses, and their warnings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from ragkv.explain.misses import head_of
from ragkv.report.account import Miss
from ragkv.report.reasons import level_of
from ragkv.report.summary import sentences

_log = logging.getLogger(__name__)


class MissLog:
    """Logs misses: as a warning when a reason first occurs, then as information."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def add(self, named: Sequence[str], misses: Sequence[Miss]) -> tuple[str, ...]:
        """Log a prompt's misses in one line; return the warnings.

        Parameters
        ----------
        named
            The chunks named for the prompt.
        """
        if not misses:
            return ()
        heads = {head_of(text) for text in named}
        all_named = len(named) > 1 and {miss.chunk for miss in misses} <= heads
        of = f"Of the {len(named):,} retrieved chunks, " if all_named else ""
        verb = "was" if len(misses) == 1 else "were"
        all_of = f"{of}{len(misses)} {verb} not reused or only in part. " if of else ""
        with self._lock:
            new = {miss.reason for miss in misses} - self._logged
            self._logged |= new
        loud = any(level_of(reason) != "info" for reason in new)
        level = logging.WARNING if loud else logging.INFO
        _log.log(level, "%s%s", all_of, " ".join(sentences(misses)))
        return tuple(sentences((miss for miss in misses if level_of(miss.reason) == "warning"), of))
