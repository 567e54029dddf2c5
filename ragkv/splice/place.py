"""Write cached rows at their prompt positions, rotated once, in float32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.model.load import LoadedModel
from ragkv.model.rotary import rotate
from ragkv.model.streams import side_stream
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Layout, Placed
from ragkv.splice.overlap import Overlap, OverlappedCache

_LAYERS_AT_ONCE = 4
"""More cost waiting, fewer calls."""


def splice(
    layout: Layout,
    sink: ChunkKV | None,
    loaded: LoadedModel,
    spare: int,
    overlap: Overlap | None = None,
    *,
    step: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> SplicedCache:
    """Return a cache that the sink's and the chunks' rows come into, a few layers at a time.

    Layers are placed just before one of them is first used: entries that are still being
    loaded arrive while the layers before are computed (Cache-Craft, section 4). Rows that
    are neither are zero until the subset pass computes them. Keys come unrotated and are
    rotated once at their positions.

    Parameters
    ----------
    sink
        The shared sink's rows, encoded from position 0; None where there is none.
    spare
        Rows to keep free for generated tokens.
    overlap
        How the chunks overlap; None is one behind the other, as they stand in the prompt.
    step
        Entered around each placing, such as a clock's step.
    """
    architecture, rotary = loaded.architecture, loaded.rotary
    if architecture is None or rotary is None:
        raise ValueError("splice() needs a supported model")
    make: Callable[..., SplicedCache] = (
        SplicedCache if overlap is None else partial(OverlappedCache, overlap=overlap)
    )
    cache = make(
        architecture,
        len(layout),
        dtype=loaded.dtype,
        device=loaded.device,
        spare=spare,
        workspace=loaded.workspace,
    )
    pieces = list(layout.placed)
    if sink is not None and layout.sink:
        head = np.arange(layout.sink)
        pieces.insert(0, Placed(sink, head, head, 0, layout.sink))
    device = loaded.device
    moves = [
        (piece.entry, _index(piece.rows, device), _index(piece.slots, device)) for piece in pieces
    ]
    fresh = _index(layout.fresh, device)
    end = max((int(piece.slots[-1]) + 1 for piece in pieces), default=0)
    positions = torch.arange(end, device=device)
    if overlap is not None:
        positions = overlap.at(positions)
    tables = rotary.tables(architecture.rope_kinds, positions)
    copies = side_stream(device)
    copies.catch_up()  # the buffer's memory may just have been another's
    ahead = device.type != "cpu"  # what comes to the host is to be there when it is used

    def place(layers: slice) -> None:
        with step():
            keys, values = cache.rows(layers)
            with copies.beside():
                for part in (keys, values):
                    _clear(part, fresh)
                    _clear(part, slice(len(layout), None))
            for entry, rows, slots in moves:
                sources = entry.layers(layers)
                if any(source.device.type != "cpu" for source in sources):
                    copies.catch_up()  # it may just have been decoded there
                with copies.beside():
                    for target, source in zip((keys, values), sources, strict=True):
                        here = source.to(device, non_blocking=ahead)
                        target[:, :, slots] = here[:, :, rows]
            with copies.beside():
                for part, kind in zip(keys, architecture.rope_kinds[layers], strict=True):
                    part[:, :end] = rotate(part[:, :end], tables[kind])

    cache.await_rows(place, _LAYERS_AT_ONCE)
    return cache


def _clear(part: torch.Tensor, positions: slice | torch.Tensor) -> None:
    """Zero positions of ``[layers, kv_heads, tokens, head_dim]``."""
    if isinstance(positions, slice):
        part[:, :, positions] = 0
    else:
        part.index_fill_(2, positions, 0)  # no number comes from the host


def _index(positions: npt.NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """Return a slice where the positions are contiguous: a copy without gathering."""
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == len(positions):
        return slice(first, last + 1)
    return torch.from_numpy(positions.astype(np.int64)).to(device)
