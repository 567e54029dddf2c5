"""Write cached rows at their prompt positions on a GPU: all chunks' layers in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import ragkv_kernels
import torch

from ragkv.chunk.kv import ChunkKV, CodedLayers, LayeredKV
from ragkv.model.rotary import RopeKind, Table
from ragkv.model.streams import side_stream
from ragkv.store.entry.codecs import GridCodec, codec_of


class Moves(NamedTuple):
    """Rows of several entries, and their slots.

    Attributes
    ----------
    entries, counts
        The entries in order, and the number of rows of each.
    part_of, rows, slots
        ``[n]`` int64 on the device: index of the row's entry, its row there, and its slot.
    """

    entries: Sequence[LayeredKV]
    counts: Sequence[int]
    part_of: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor

    def some(self, numbers: Sequence[int]) -> Moves:
        """Return the rows of some entries."""
        if len(numbers) == len(self.entries):
            return self
        counts = list(self.counts)
        rows, slots = (torch.split(part, counts) for part in (self.rows, self.slots))
        parts = [torch.full_like(rows[each], number) for number, each in enumerate(numbers)]
        return Moves(
            [self.entries[each] for each in numbers],
            [counts[each] for each in numbers],
            torch.cat(parts),
            torch.cat([rows[each] for each in numbers]),
            torch.cat([slots[each] for each in numbers]),
        )


def put_on_device(
    moves: Moves,
    layers: slice,
    target: tuple[torch.Tensor, torch.Tensor],
    kinds: Sequence[RopeKind],
    tables: Mapping[RopeKind, Table],
) -> None:
    """Copy, decode and rotate rows of some layers on the device's side stream.

    Encoded layers are copied without decoding, and decoded on the device.

    Parameters
    ----------
    target
        Keys and values of the buffer's ``layers``, ``[layers, kv_heads, capacity, head_dim]``.
    kinds
        The rotary kind of each of these layers.
    tables
        Tables by kind, with a row for each of the buffer's slots.
    """
    device = target[0].device  # on MPS an asynchronous copy can read freed memory
    copies = side_stream(device)
    waits = device.type == "mps"
    plain: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    encoded: dict[int, tuple[CodedLayers, torch.Tensor]] = {}
    for number, entry in enumerate(moves.entries):
        coded = entry.coded(layers)
        here = [*entry.layers(layers)] if coded is None else [coded.data]
        if any(part.device != device for part in here):
            with copies.on_side_stream():
                here = [part.to(device, non_blocking=not waits) for part in here]
        if coded is None:
            plain[number] = here[0], here[1]
        elif isinstance(codec_of(coded.codec), GridCodec):
            encoded[number] = coded, here[0]
        else:
            plain[number] = _numbers(here[0][:, : coded.size], target[0], len(entry.token_ids))
    with copies.on_side_stream():
        for run, kind in _runs(kinds):
            into = target[0][run], target[1][run]
            cos, sin, adjacent = tables[kind]
            turn: dict[str, Any] = {"table": (cos, sin), "adjacent": adjacent}
            if plain:
                some = moves.some(list(plain))
                ragkv_kernels.place(
                    [(keys[run], values[run]) for keys, values in plain.values()],
                    *into,
                    counts=some.counts,
                    part_of=some.part_of,
                    rows=some.rows,
                    slots=some.slots,
                    **turn,
                )
            for number, (coded, data) in encoded.items():
                one, codec = moves.some([number]), codec_of(coded.codec)
                ragkv_kernels.restore(
                    data[run][:, : coded.size],
                    len(one.entries[0].token_ids),
                    *into,
                    rows=one.rows,
                    slots=one.slots,
                    grid=codec.grid,  # type: ignore[attr-defined]
                    **turn,
                )


def is_resident(entry: LayeredKV, device: torch.device) -> bool:
    """Whether all of an entry is on a device already."""
    return isinstance(entry, ChunkKV) and entry.keys.device == device


def _numbers(
    data: torch.Tensor, like: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of layers in raw bytes."""
    _, heads, _, width = like.shape
    keys, values = data.view(like.dtype).view(len(data), 2, heads, tokens, width).unbind(1)
    return keys, values


def _runs(kinds: Sequence[RopeKind]) -> Iterator[tuple[slice, RopeKind]]:
    """Yield neighbouring layers of one kind."""
    start = 0
    for kind, layers in groupby(kinds):
        stop = start + len(list(layers))
        yield slice(start, stop), kind
        start = stop
