"""Write cached rows at their prompt positions, rotated once, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.model.loaded import ReusableModel
from ragkv.model.rotary import RopeKind, Table, rotate, rotate_into
from ragkv.model.streams import all_to_device, side_stream, to_device
from ragkv.splice.buffer import Shift, SplicedCache
from ragkv.splice.layout import Layout, Origin, Placed
from ragkv.splice.on_device import Moves, is_resident, put_on_device

_LAYERS_AT_ONCE = 4
"""More layers delay the first, fewer need more calls."""

_Index = slice | torch.Tensor


def splice(
    layout: Layout,
    sink: ChunkKV | None,
    loaded: ReusableModel,
    spare: int,
    *,
    step: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> SplicedCache:
    """Return a cache into which the cached rows are placed, some layers at a time.

    Layers are placed just before the first use of one of them: lazy entries load while earlier
    layers are computed (Cache-Craft, section 4). Other rows are zero until the subset pass computes
    them. Keys are unrotated in entries, and rotated once to their positions. Rows of earlier
    prompts are copied unchanged, since their positions are the same.

    Parameters
    ----------
    sink
        The shared sink's rows, encoded from position 0, or None.
    spare
        Free rows for generated tokens.
    step
        Context of each placement, such as a step of a clock.
    """
    architecture, rotary = loaded.architecture, loaded.rotary
    cache = SplicedCache(loaded, len(layout), spare=spare)
    earlier = () if layout.history is None else layout.history.parts
    pieces = [
        piece for piece in layout.placed if (layout.origin[piece.slots] == Origin.CACHED).any()
    ]
    if sink is not None and layout.sink and (layout.history is None or not layout.history.exact):
        head = np.arange(layout.sink)
        pieces.insert(0, Placed(sink, head, head, 0, layout.sink))
    begin = min((int(piece.slots[0]) for piece in pieces), default=0)
    end = max((int(piece.slots[-1]) + 1 for piece in pieces), default=0)
    shift = Shift(layout.compared)
    device = loaded.device
    positions = torch.arange(begin, end, device=device)
    tables = rotary.tables(architecture.rope_kinds, positions) if pieces else {}
    where = [shift.positions, layout.fresh, *(part.positions for part in earlier)]
    compared, fresh, *of_earlier = _indices(where, device)
    put: Callable[..., None]
    if device.type == "cpu":
        put = partial(_put_on_host, [_host_move(piece, begin) for piece in pieces])
    else:
        put = partial(put_on_device, _moves(pieces, begin, device))
    copies = side_stream(device)
    copies.wait_for_compute()  # earlier work can still use the buffer's memory

    def place(layers: slice, target: tuple[torch.Tensor, torch.Tensor]) -> None:
        with step():
            with copies.on_side_stream():
                for part in target:
                    _clear(part, fresh)
                    _clear(part, slice(len(layout), None))
            if pieces:
                behind = target[0][:, :, begin:], target[1][:, :, begin:]
                put(layers, behind, architecture.rope_kinds[layers], tables)
            with copies.on_side_stream():
                overlay(target, layers)

    def overlay(target: tuple[torch.Tensor, torch.Tensor], layers: slice) -> None:
        found = len(shift.positions) > 0
        before = [part[:, :, compared].clone() for part in target] if found else []
        for rows, at in zip(earlier, of_earlier, strict=True):
            for into, kept in zip(target, rows.rows, strict=True):
                into[:, :, at] = kept[layers].to(device, non_blocking=device.type != "mps")
        if found:
            after = (part[:, :, compared] for part in target)
            shift.add(layers, *(now - was for now, was in zip(after, before, strict=True)))

    cache.shift = shift
    # rows that are on the device are placed in one call: its time is that of the launches
    resident = device.type != "cpu" and all(is_resident(each.entry, device) for each in pieces)
    cache.await_rows(place, architecture.layers if resident else _LAYERS_AT_ONCE)
    return cache


def _moves(pieces: Sequence[Placed], begin: int, device: torch.device) -> Moves:
    """Return the rows to place, with slots counted from ``begin``."""
    nothing = np.zeros(0, dtype=np.int64)
    counts = [len(piece.rows) for piece in pieces]
    part_of = np.repeat(np.arange(len(pieces)), counts)
    rows = np.concatenate([nothing, *(piece.rows for piece in pieces)])
    slots = np.concatenate([nothing, *(piece.slots - begin for piece in pieces)])
    together = to_device(np.stack([part_of, rows, slots]).astype(np.int64), device)
    return Moves([piece.entry for piece in pieces], counts, *together.unbind())


def _host_move(piece: Placed, begin: int) -> tuple[LayeredKV, _Index, _Index]:
    """Return an entry, its rows, and their slots."""
    return piece.entry, _index(piece.rows), _index(piece.slots - begin)


def _put_on_host(
    moves: Sequence[tuple[LayeredKV, _Index, _Index]],
    layers: slice,
    target: tuple[torch.Tensor, torch.Tensor],
    kinds: Sequence[RopeKind],
    tables: Mapping[RopeKind, Table],
) -> None:
    """Copy rows of some layers to their slots, and rotate the keys on the way."""
    alike = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    for entry, rows, slots in moves:
        keys, values = (part[:, :, rows].to(target[0].device) for part in entry.layers(layers))
        target[1][:, :, slots] = values
        first = 0
        for kind, count in alike:
            some, into = keys[first : first + count], target[0][first : first + count]
            table = tables[kind].at(slots)
            if isinstance(slots, slice):
                rotate_into(into[:, :, slots], some, table)
            else:
                into[:, :, slots] = rotate(some, table)
            first += count


def _clear(part: torch.Tensor, positions: _Index) -> None:
    """Zero positions of ``[layers, kv_heads, tokens, head_dim]``."""
    if isinstance(positions, slice):
        part[:, :, positions] = 0
    else:
        part.index_fill_(2, positions, 0)  # needs no copy from the host


def _index(positions: npt.NDArray[np.int64]) -> _Index:
    """Return a slice if the positions are contiguous, to copy without gathering."""
    if not len(positions):
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == len(positions):
        return slice(first, last + 1)
    return torch.from_numpy(positions.astype(np.int64))


def _indices(several: Sequence[npt.NDArray[np.int64]], device: torch.device) -> Sequence[_Index]:
    """Return indices of these positions on the device, transferred in one copy."""
    if device.type == "cpu":
        return [_index(positions) for positions in several]
    return all_to_device(several, device)
