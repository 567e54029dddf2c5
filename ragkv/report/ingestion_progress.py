"""Progress of an ingestion: a bar, or lines with the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm.auto import tqdm

from ragkv.errors import StoreFullError
from ragkv.report.account import PrecomputeReport
from ragkv.report.words import count

FIRST_LINE_S = 2.0
LINES_S = 30.0
"""Seconds to the first line in a log, and between lines (or a tenth of the elapsed time)."""


class IngestionProgress(tqdm):  # type: ignore[type-arg]
    """A bar in a terminal; elsewhere, such as in a log file, lines with the time left.

    Parameters
    ----------
    lengths
        Tokens of each new chunk, or characters of each file (in a client, of each text).
    known
        Chunks that are already stored.
    show
        True always shows a bar, False nothing, None a bar in a terminal and lines elsewhere.

    Attributes
    ----------
    tokens
        Tokens of the chunks that are stored now.
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
        """Count a written chunk or file."""
        self.update()
        self._stored += 1
        self.tokens += tokens

    def say_left(self) -> None:
        """Write the time left if a line is due; called between batches."""
        now = time.monotonic()
        if self._has_lines and now >= self._next_line and 0 < self.tokens < self._all:
            so_far = now - self._began
            left = so_far * (self._all - self.tokens) / self.tokens
            done = f"{self._stored:,} of {self._new:,} {self._unit}s"
            say(f"ragkv: {done} done, {self.format_interval(left)} left")
            self._next_line = now + max(LINES_S, so_far / 10)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Add the stored chunks and the remedy to the error of a full store."""
        try:
            yield
        except StoreFullError as error:
            raise StoreFullError(
                f"{error}. {self._stored:,} of {count(self._new, 'chunk')} are stored: make room "
                "and repeat the call, or give another store or a smaller codec"
            ) from error

    def end(self, report: PrecomputeReport) -> PrecomputeReport:
        """Write the closing line; return the report."""
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
