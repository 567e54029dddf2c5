"""What an ingestion takes, said before it begins."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from ragkv.errors import StoreFullError
from ragkv.model.loaded import ReusableModel
from ragkv.report.plural import count
from ragkv.store.base import Room
from ragkv.store.entry.codecs import codec_of

_BESIDE_TENSORS = 12
"""Bytes of a token's id and its two offsets."""


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
        """Return the bytes in a codec; what zstd compresses is not known before."""
        shape, dtype = self.loaded.architecture, self.loaded.dtype
        size = codec_of((codec or self.codec).removesuffix("+zstd")).size
        return sum(
            shape.layers * size((2, shape.kv_heads, length, shape.head_dim), dtype)
            + _BESIDE_TENSORS * length
            for length in self.lengths
        )

    def begin(self, room: Room | None, total: int, *, show_progress: bool | None) -> Any:
        """Say the size and return the bar, out of ``total`` chunks; None: in a terminal alone.

        Raises
        ------
        StoreFullError
            The disk cannot hold the entries.
        """
        new = len(self.lengths)
        if new:
            self._require(room)
        if new and show_progress is not False:
            tqdm.write(self._to_line(room), file=sys.stderr)
        hidden = None if show_progress is None else not show_progress
        bar: dict[str, Any] = {
            "desc": "precompute",
            "unit": "chunk",
            "disable": hidden if new else True,
        }
        return tqdm(total=total, initial=total - new, **bar)

    def _to_line(self, room: Room | None) -> str:
        tokens, dtype = sum(self.lengths), str(self.loaded.dtype).removeprefix("torch.")
        line = (
            f"ragkv: encoding {count(len(self.lengths), 'chunk')} of {count(tokens, 'token')} at "
            f"{self.nbytes() / tokens:,.0f} bytes a token ({self.loaded.name}, {dtype}, "
            f"codec {self.codec}): {_readable(self.nbytes())}"
        )
        if room is not None:
            line += f"; {_readable(room.nbytes)} left in {room.place}"
            if self.codec.startswith("raw"):
                line += f'; codec="int8" takes {_readable(self.nbytes("int8"))}'
        return line

    def _require(self, room: Room | None) -> None:
        needed = self.nbytes()
        if room is not None and needed > room.nbytes and not self.codec.endswith("+zstd"):
            raise StoreFullError(
                f"the chunks take {_readable(needed)}, and {_readable(room.nbytes)} are left in "
                f"{room.place}: free that much, give another store, or a smaller codec, "
                f'StoreConfig(codec="int8") with {_readable(self.nbytes("int8"))} or "int4" with '
                f"{_readable(self.nbytes('int4'))}"
            )


def _readable(nbytes: float) -> str:
    unit, factor = ("GB", 1e9) if nbytes >= 1e9 else ("MB", 1e6) if nbytes >= 1e6 else ("KB", 1e3)
    return f"{nbytes / factor:,.3g} {unit}" if nbytes < 1e12 else f"{nbytes / 1e9:,.0f} GB"
