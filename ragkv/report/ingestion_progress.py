"""How far an ingestion is: a bar, or lines with the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm.auto import tqdm

from ragkv.errors import StoreFullError
from ragkv.report.account import PrecomputeReport
from ragkv.report.plural import count

FIRST_LINE_S = 2.0
LINES_S = 30.0
"""Seconds to the first line in a log, and between further ones, or a tenth of the time so far."""


class IngestionProgress(tqdm):  # type: ignore[type-arg]
    """A bar in a terminal; elsewhere, as in a log file, lines with the time that is left.

    Parameters
    ----------
    lengths
        Tokens of each new chunk, or characters of each file, or of each text in a client.
    known
        Chunks that are stored already.
    show
        True shows a bar anywhere, False nothing.

    Attributes
    ----------
    tokens
        Those of the chunks that are stored.
    """

    def __init__(
        self, lengths: Sequence[int], known: int = 0, *, show: bool | None, unit: str = "chunk"
    ) -> None:
        hidden = None if show is None else not show
        super().__init__(
            total=known + len(lengths),
            initial=known,
            desc="precompute",
            unit=unit,
            disable=hidden if lengths else True,
        )
        self._is_shown = bool(lengths) and show is not False
        self._has_lines = self._is_shown and self.disable
        self._unit, self._new, self._all = unit, len(lengths), sum(lengths)
        self._stored = self.tokens = 0
        self._began = time.monotonic()
        self._next_line = self._began + FIRST_LINE_S

    def stored(self, tokens: int) -> None:
        """Count a chunk, or a file, that is written."""
        self.update()
        self._stored += 1
        self.tokens += tokens

    def say_left(self) -> None:
        """Write the time left where a line is due; call it between batches."""
        now = time.monotonic()
        if self._has_lines and now >= self._next_line and 0 < self.tokens < self._all:
            so_far = now - self._began
            left = so_far * (self._all - self.tokens) / self.tokens
            done = f"{self._stored:,} of {self._new:,} {self._unit}s"
            say(f"ragkv: {done} done, {self.format_interval(left)} left")
            self._next_line = now + max(LINES_S, so_far / 10)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say what is stored and what to do where the store turns out to be full."""
        try:
            yield
        except StoreFullError as error:
            raise StoreFullError(
                f"{error}. {self._stored:,} of {count(self._new, 'chunk')} are stored: make room, "
                "then the same call stores the others, or give another store or a smaller codec"
            ) from error

    def end(self, report: PrecomputeReport) -> PrecomputeReport:
        """Say what was done, and return it."""
        if self._is_shown and report.new:
            say(
                f"ragkv: {count(report.new, 'chunk')} new, {report.existing:,} known: "
                f"{readable(report.bytes)} in {self.format_interval(report.seconds)}"
            )
        return report


def say(line: str) -> None:
    """Write a line to standard error, above a bar."""
    tqdm.write(line, file=sys.stderr)


def readable(nbytes: float) -> str:
    """Return a size in KB, MB or GB."""
    unit, factor = ("GB", 1e9) if nbytes >= 1e9 else ("MB", 1e6) if nbytes >= 1e6 else ("KB", 1e3)
    return f"{nbytes / factor:,.3g} {unit}" if nbytes < 1e12 else f"{nbytes / 1e9:,.0f} GB"
