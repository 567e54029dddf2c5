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
        (piece.entry, _index(piece.rows, torch.device("cpu")), _index(piece.slots, device))
        for piece in pieces
    ]
    fresh = _index(layout.fresh, device)
    end = max((int(piece.slots[-1]) + 1 for piece in pieces), default=0)
    positions = torch.arange(end, device=device)
    if overlap is not None:
        positions = overlap.at(positions)
    tables = rotary.tables(architecture.rope_kinds, positions)

    def place(layers: slice) -> None:
        with step():
            keys, values = cache.rows(layers)
            for part in (keys, values):
                part[:, :, fresh] = 0
                part[:, :, len(layout) :] = 0
            for entry, rows, slots in moves:
                for target, source in zip((keys, values), entry.layers(layers), strict=True):
                    wanted = rows if isinstance(rows, slice) else rows.to(source.device)
                    target[:, :, slots] = source[:, :, wanted].to(device, non_blocking=True)
            for part, kind in zip(keys, architecture.rope_kinds[layers], strict=True):
                part[:, :end] = rotate(part[:, :end], tables[kind])

    cache.await_rows(place, _LAYERS_AT_ONCE)
    return cache


def _index(positions: npt.NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """Return a slice where the positions are contiguous: a copy without gathering."""
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == len(positions):
        return slice(first, last + 1)
    return torch.from_numpy(positions.astype(np.int64)).to(device)
