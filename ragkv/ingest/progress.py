"""What an ingestion takes, said before it begins, while it runs and at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm.auto import tqdm

from ragkv.errors import StoreFullError
from ragkv.model.loaded import ReusableModel
from ragkv.report.account import PrecomputeReport
from ragkv.report.plural import count
from ragkv.store.base import Room
from ragkv.store.entry.codecs import codec_of

_BESIDE_TENSORS = 12
"""Bytes of a token's id and its two offsets."""
FIRST_LINE_S = 2.0
LINES_S = 30.0
"""Seconds to the first line in a log, and between further ones, or a tenth of the time so far."""


@dataclass(frozen=True, slots=True)
class IngestionSize:
    """What the entries of some chunks are going to take.

    Attributes
    ----------
    lengths
        Tokens of each chunk.
    """

    loaded: ReusableModel
    codec: str
    lengths: Sequence[int]

    def nbytes(self, codec: str | None = None) -> int:
        """Return the bytes in a codec, by default that of the store."""
        shape, dtype = self.loaded.architecture, self.loaded.dtype
        size = codec_of(codec or self.codec).size
        return sum(
            shape.layers * size((2, shape.kv_heads, length, shape.head_dim), dtype)
            + _BESIDE_TENSORS * length
            for length in self.lengths
        )

    def begin(
        self,
        room: Room | None,
        total: int,
        seconds: float | None = None,
        *,
        show_progress: bool | None,
    ) -> IngestionProgress:
        """Say the size and return the progress, of ``total`` chunks with the known ones.

        ``seconds`` are what the new ones take, where that is known.

        Raises
        ------
        StoreFullError
            The disk cannot hold the entries.
        """
        if self.lengths:
            self._require(room)
        if self.lengths and show_progress is not False:
            about = "" if seconds is None else f"; about {tqdm.format_interval(seconds)}"
            _say(self._to_line(room) + about)
        return IngestionProgress(self.lengths, total - len(self.lengths), show=show_progress)

    def _to_line(self, room: Room | None) -> str:
        tokens, dtype = sum(self.lengths), str(self.loaded.dtype).removeprefix("torch.")
        line = (
            f"ragkv: encoding {count(len(self.lengths), 'chunk')} of {count(tokens, 'token')} at "
            f"{self.nbytes() / tokens:,.0f} bytes a token ({self.loaded.name}, {dtype}, "
            f"codec {self.codec}): {_readable(self.nbytes())}"
        )
        if room is not None:
            line += f"; {_readable(room.nbytes)} left in {room.place}"
            if self.codec == "raw":
                line += f'; codec="int8" takes {_readable(self.nbytes("int8"))}'
        return line

    def _require(self, room: Room | None) -> None:
        needed = self.nbytes()
        if room is not None and needed > room.nbytes:
            raise StoreFullError(
                f"the chunks take {_readable(needed)}, and {_readable(room.nbytes)} are left in "
                f"{room.place}: free that much, give another store, or a smaller codec, "
                f'StoreConfig(codec="int8") with {_readable(self.nbytes("int8"))} or "int4" with '
                f"{_readable(self.nbytes('int4'))}"
            )


class IngestionProgress(tqdm):  # type: ignore[type-arg]
    """A bar in a terminal; elsewhere, as in a log file, lines with the time that is left.

    Parameters
    ----------
    lengths
        Tokens of each new chunk, or characters of each file.
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
        now = time.monotonic()
        if self._has_lines and now >= self._next_line and self.tokens < self._all:
            so_far = now - self._began
            left = so_far * (self._all - self.tokens) / self.tokens
            count = f"{self._stored:,} of {self._new:,} {self._unit}s"
            _say(f"ragkv: {count} done, {self.format_interval(left)} left")
            self._next_line = now + max(LINES_S, so_far / 10)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say what is stored and what to do where the store turns out to be full."""
        try:
            yield
        except StoreFullError as error:
            raise StoreFullError(
                f"{error}. {self._stored:,} of {self._new:,} chunks are stored: make room, then "
                "the same call stores the others, or give another store or a smaller codec"
            ) from error

    def end(self, report: PrecomputeReport) -> PrecomputeReport:
        """Say what was done, and return it."""
        if self._is_shown:
            _say(
                f"ragkv: {count(report.new, 'chunk')} new, {report.existing:,} known: "
                f"{_readable(report.bytes)} in {self.format_interval(report.seconds)}"
            )
        return report


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


def _readable(nbytes: float) -> str:
    unit, factor = ("GB", 1e9) if nbytes >= 1e9 else ("MB", 1e6) if nbytes >= 1e6 else ("KB", 1e3)
    return f"{nbytes / factor:,.3g} {unit}" if nbytes < 1e12 else f"{nbytes / 1e9:,.0f} GB"
