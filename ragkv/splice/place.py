"""Write cached rows at their prompt positions, rotated once, in float32."""

from __future__ import annotations

from collections.abc import Callable
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


def splice(
    layout: Layout,
    sink: ChunkKV | None,
    loaded: LoadedModel,
    spare: int,
    overlap: Overlap | None = None,
) -> SplicedCache:
    """Return a cache with the sink's and the chunks' rows at their places.

    Rows that are neither are zero until the subset pass computes them. Keys come
    unrotated and are rotated once at their positions (Cache-Craft, section 4).

    Parameters
    ----------
    sink
        The shared sink's rows, encoded from position 0; None where there is none.
    spare
        Rows to keep free for generated tokens.
    overlap
        How the chunks overlap; None is one behind the other, as they stand in the prompt.
    """
    architecture, rotary = loaded.architecture, loaded.rotary
    if architecture is None or rotary is None:
        raise ValueError("splice() needs a supported model")
    make: Callable[..., SplicedCache] = (
        SplicedCache if overlap is None else partial(OverlappedCache, overlap=overlap)
    )
    cache = make(architecture, len(layout), dtype=loaded.dtype, device=loaded.device, spare=spare)
    pieces = list(layout.placed)
    if sink is not None and layout.sink:
        head = np.arange(layout.sink)
        pieces.insert(0, Placed(sink, head, head, 0, layout.sink))
    for piece in pieces:
        rows, slots = _index(piece.rows, cache.keys.device), _index(piece.slots, cache.keys.device)
        _copy(cache.keys, slots, piece.entry.keys, rows)
        _copy(cache.values, slots, piece.entry.values, rows)
    fresh = _index(layout.fresh, cache.keys.device)
    for part in (cache.keys, cache.values):
        part[:, :, fresh] = 0
        part[:, :, len(layout) :] = 0
    if pieces:
        end = max(int(piece.slots[-1]) for piece in pieces) + 1
        positions = torch.arange(end, device=loaded.device)
        if overlap is not None:
            positions = overlap.at(positions)
        tables = rotary.tables(architecture.rope_kinds, positions)
        for keys, kind in zip(cache.keys, architecture.rope_kinds, strict=True):
            keys[:, :end] = rotate(keys[:, :end], tables[kind])
    return cache


def _index(positions: npt.NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """Return a slice where the positions are contiguous: a copy without gathering."""
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == len(positions):
        return slice(first, last + 1)
    return torch.from_numpy(positions.astype(np.int64)).to(device)


def _copy(
    target: torch.Tensor,
    slots: slice | torch.Tensor,
    source: torch.Tensor,
    rows: slice | torch.Tensor,
) -> None:
    """Copy ``source[:, :, rows]`` to ``target[:, :, slots]`` across devices."""
    if isinstance(rows, torch.Tensor):
        rows = rows.to(source.device)
    target[:, :, slots] = source[:, :, rows].to(target.device, non_blocking=True)
