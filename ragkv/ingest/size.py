"""The size of an ingestion, reported before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm

from ragkv.errors import StoreFullError
from ragkv.model.loaded import ReusableModel
from ragkv.report.ingestion_progress import IngestionProgress, readable, say
from ragkv.report.words import count
from ragkv.store.entry.codecs import codec_of
from ragkv.store.types import Room

_BESIDE_TENSORS = 12
"""Bytes of a token's id and its two offsets."""


@dataclass(frozen=True, slots=True)
class IngestionSize:
    """The size of the entries of chunks.

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
        """Report the size; return the progress over ``total`` chunks, known ones included.

        ``seconds`` is the estimated time for new chunks; None before the first measurement.

        Raises
        ------
        StoreFullError
            The disk cannot hold the entries.
        """
        if self.lengths:
            self._require(room)
        if self.lengths and show_progress is not False:
            time_left = (
                "estimating" if seconds is None else f"about {tqdm.format_interval(seconds)}"
            )
            say(f"{self._to_line(room)}; time left: {time_left}")
        return IngestionProgress(self.lengths, total - len(self.lengths), show=show_progress)

    def _to_line(self, room: Room | None) -> str:
        tokens, dtype = sum(self.lengths), str(self.loaded.dtype).removeprefix("torch.")
        line = (
            f"ragkv: encoding {count(len(self.lengths), 'chunk')} of {count(tokens, 'token')} at "
            f"{self.nbytes() / tokens:,.0f} bytes per token ({self.loaded.name}, {dtype}, "
            f"codec {self.codec}): {readable(self.nbytes())}"
        )
        if room is not None:
            line += f"; {readable(room.nbytes)} left in {room.place}"
            if self.codec == "raw":
                line += f'; codec="int8" takes {readable(self.nbytes("int8"))}'
        return line

    def _require(self, room: Room | None) -> None:
        needed = self.nbytes()
        if room is not None and needed > room.nbytes:
            raise StoreFullError(
                f"the chunks take {readable(needed)}, but {readable(room.nbytes)} are left in "
                f"{room.place}: free that much, give another store, or a smaller codec: "
                f'StoreConfig(codec="int8") takes {readable(self.nbytes("int8"))}, "int4" '
                f"{readable(self.nbytes('int4'))}"
            )
