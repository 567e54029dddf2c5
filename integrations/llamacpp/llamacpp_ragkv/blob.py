"""The state of one sequence as llama.cpp's ``llama_state_seq_get_data`` writes it.

Little endian: u32 magic, i32 sequence, u32 streams. A stream: u32 cells, and unless it is empty,
per cell (i32 position, u32 1, i32 sequence), then u32 whether V is transposed, u32 layers, from
version 4 on u32 and u32 for rotated K and V, then K and V. A matrix of a layer: i32 type, u64 bytes
of a row, rows; of a transposed V: i32 type, u32 bytes of a value, u32 width, columns. The blob does
not contain its version.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ragkv.errors import UnsupportedModelError

_MAGIC = 0xAF143CD8
_HEAD, _CELLS, _CELL = struct.Struct("<IiI"), struct.Struct("<I"), np.dtype("<i4,<u4,<i4")
_ROWS, _COLUMNS = struct.Struct("<iQ"), struct.Struct("<iII")
_DTYPES: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2")}
"""Numbers of ggml's types F32 and F16."""
Matrix = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class BlobFormat:
    """Everything in a blob but its cells and rows.

    Attributes
    ----------
    streams, stream
        Number of streams, and the only one with cells.
    transposed
        Whether V is written in columns.
    rotation
        What version 4 adds, ``(0, 0)`` for unrotated rows; empty in version 3.
    keys, values
        Types of K and V.
    """

    sequence: int
    streams: int
    stream: int
    transposed: bool
    rotation: tuple[int, ...]
    keys: np.dtype[Any]
    values: np.dtype[Any]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRows:
    """The rows of one sequence.

    Attributes
    ----------
    positions
        ``[tokens]`` int32.
    keys, values
        ``[layers, tokens, width]``; keys after RoPE, in llama.cpp's order of dimensions.
    """

    positions: npt.NDArray[np.int32]
    keys: Matrix
    values: Matrix


class _Reader:
    def __init__(self, blob: bytes) -> None:
        self._blob, self.at = blob, 0

    def take(self, form: struct.Struct) -> tuple[int, ...]:
        found = form.unpack_from(self._blob, self.at)
        self.at += form.size
        return found

    def array(self, dtype: np.dtype[Any], count: int) -> Matrix:
        found = np.frombuffer(self._blob, dtype, count, self.at)
        self.at += found.nbytes
        return found


def parse(blob: bytes) -> tuple[BlobFormat, SequenceRows]:
    """Read a blob to its last byte.

    Raises
    ------
    UnsupportedModelError
        Its format is unknown, or K or V are quantised.
    """
    reasons = []
    for rotations in (0, 2):
        try:
            return _parse(blob, rotations)
        except (struct.error, ValueError) as error:
            reasons.append(str(error))
    raise UnsupportedModelError(f"unknown format of llama.cpp's state: {'; '.join(reasons)}")


def _parse(blob: bytes, rotations: int) -> tuple[BlobFormat, SequenceRows]:
    reader = _Reader(blob)
    magic, sequence, streams = reader.take(_HEAD)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic:#x}")
    stream, cells = 0, 0
    while not cells and stream < streams:
        (cells,) = reader.take(_CELLS)
        stream += 1
    table = reader.array(_CELL, cells)
    if not cells or (table["f1"] != 1).any() or (table["f2"] != sequence).any():
        raise ValueError("its cells are not those of one sequence")
    transposed, layers, *rotation = reader.take(struct.Struct(f"<{2 + rotations}I"))
    if any(rotation) or transposed > 1:
        raise ValueError(f"K or V are rotated: {rotation}")
    keys = [_rows(reader, cells) for _ in range(layers)]
    read = _columns if transposed else _rows
    values = [read(reader, cells) for _ in range(layers)]
    for _ in range(streams - stream):
        if reader.take(_CELLS) != (0,):
            raise ValueError("several streams have cells")
    if reader.at != len(blob):
        raise ValueError(f"{len(blob) - reader.at} bytes are left")
    rows = SequenceRows(table["f0"].copy(), np.stack(keys), np.stack(values))
    types = rows.keys.dtype, rows.values.dtype
    return BlobFormat(
        sequence, streams, stream - 1, bool(transposed), tuple(rotation), *types
    ), rows


def _dtype(kind: int) -> np.dtype[Any]:
    if kind not in _DTYPES:
        raise ValueError(f"K or V have the type {kind} of ggml, which is neither F32 nor F16")
    return _DTYPES[kind]


def _rows(reader: _Reader, cells: int) -> Matrix:
    kind, size = reader.take(_ROWS)
    dtype = _dtype(kind)
    return reader.array(dtype, cells * size // dtype.itemsize).reshape(cells, -1)


def _columns(reader: _Reader, cells: int) -> Matrix:
    kind, size, width = reader.take(_COLUMNS)
    dtype = _dtype(kind)
    if size != dtype.itemsize:
        raise ValueError(f"a value of V has {size} bytes")
    return reader.array(dtype, cells * width).reshape(width, cells).T


def render(form: BlobFormat, rows: SequenceRows) -> bytes:
    """Write rows as llama.cpp does, in the format's types."""
    cells = np.empty(len(rows.positions), _CELL)
    cells["f0"], cells["f1"], cells["f2"] = rows.positions, 1, form.sequence
    parts = [_HEAD.pack(_MAGIC, form.sequence, form.streams), bytes(4 * form.stream)]
    parts += [_CELLS.pack(len(cells)), cells.tobytes()]
    numbers = int(form.transposed), len(rows.keys), *form.rotation
    parts.append(struct.pack(f"<{len(numbers)}I", *numbers))
    for each in rows.keys.astype(form.keys, copy=False):
        parts += _written_rows(each)
    write = _written_columns if form.transposed else _written_rows
    for each in rows.values.astype(form.values, copy=False):
        parts += write(each)
    parts.append(bytes(4 * (form.streams - form.stream - 1)))
    return b"".join(parts)


def _kind(rows: Matrix) -> int:
    return next(kind for kind, dtype in _DTYPES.items() if dtype == rows.dtype)


def _written_rows(rows: Matrix) -> list[bytes]:
    return [_ROWS.pack(_kind(rows), rows.shape[1] * rows.itemsize), rows.tobytes()]


def _written_columns(rows: Matrix) -> list[bytes]:
    return [_COLUMNS.pack(_kind(rows), rows.itemsize, rows.shape[1]), rows.T.tobytes()]
