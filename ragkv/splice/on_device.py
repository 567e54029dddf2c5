"""Write cached rows at their prompt positions on a GPU: a chunk's layers in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from ragkv.chunk.kv import CodedLayers, LayeredKV
from ragkv.model.rotary import RopeKind, Table
from ragkv.model.streams import side_stream
from ragkv.store.entry.codecs import codec_of
from ragkv.store.entry.codecs.grid import GridCodec

Move = tuple[LayeredKV, torch.Tensor, torch.Tensor]
"""An entry, rows of it and the slots that they go to, ``[n]`` int64 each."""


def put_on_device(
    moves: Sequence[Move],
    layers: slice,
    target: tuple[torch.Tensor, torch.Tensor],
    kinds: Sequence[RopeKind],
    tables: Mapping[RopeKind, Table],
) -> None:
    """Copy, decode and rotate rows of some layers on the device's side stream.

    Encoded layers are copied as they are stored, and decoded on the device.

    Parameters
    ----------
    moves
        Rows and slots lie on the device.
    target
        Keys and values of the buffer's ``layers``, ``[layers, kv_heads, capacity, head_dim]``.
    kinds
        The rotary kind of each of these layers.
    tables
        By kind, with a row for each of the buffer's slots.
    """
    device = target[0].device  # on MPS an asynchronous copy may read freed memory
    copies = side_stream(device)
    for entry, rows, slots in moves:
        coded = entry.coded(layers)
        cached = entry.layers(layers) if coded is None else (coded.data,)
        with copies.on_side_stream():
            here = [part.to(device, non_blocking=device.type != "mps") for part in cached]
            for run, kind in _runs(kinds):
                into = target[0][run], target[1][run]
                parts = [part[run] for part in here]
                cos, sin, adjacent = tables[kind]
                where = {"rows": rows, "slots": slots, "table": (cos, sin), "adjacent": adjacent}
                _write(entry, coded, parts, into, where)


def _write(
    entry: LayeredKV,
    coded: CodedLayers | None,
    parts: Sequence[torch.Tensor],
    into: tuple[torch.Tensor, torch.Tensor],
    where: Mapping[str, Any],
) -> None:
    """Write layers that turn alike: keys and values, or what a codec made of them."""
    import ragkv_kernels

    tokens = len(entry.token_ids)
    if coded is not None:
        codec, data = codec_of(coded.codec), parts[0][:, : coded.size]
        if isinstance(codec, GridCodec):
            ragkv_kernels.restore(data, tokens, *into, **where, grid=codec.grid)
            return
        _, heads, _, width = into[0].shape
        parts = data.view(into[0].dtype).view(len(data), 2, heads, tokens, width).unbind(1)
    ragkv_kernels.move((parts[0], parts[1]), *into, **where)


def _runs(kinds: Sequence[RopeKind]) -> Iterator[tuple[slice, RopeKind]]:
    """Yield neighbouring layers of one kind."""
    start = 0
    for kind, layers in groupby(kinds):
        stop = start + len(list(layers))
        yield slice(start, stop), kind
        start = stop
