"""The mean shift of a chunk's probes, which its other tokens follow (AgentKVShift).

A relative of drift (:mod:`ragkv.recompute.drift`): there each token follows the recomputed
tokens near it, here all tokens of a chunk follow one mean, as far as they moved in an early layer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ragkv.model.loaded import ReusableModel
from ragkv.model.rotary import add_rotated, unrotate
from ragkv.model.streams import to_device
from ragkv.splice.layout import Layout


class MeanShift:
    """Moves a layer's unrepaired rows just before its recomputed rows are written.

    A row moves by ``min(d, 1) m``: ``d`` is how far the token moved in the layer that the rule
    looked at, ``m`` the mean of what the chunk's probes move by in this layer. Keys and values have
    a ``d``, probes and a mean of their own; keys are compared and moved unrotated. Probes of a kind
    are the chunk's recomputed tokens with the largest ``d``, down to the first token that is not
    recomputed; all recomputed ones where that is the first of all.

    Parameters
    ----------
    layout
        The prompt's layout; rows that are exact already are neither read nor moved.
    moved
        ``[2, cached]`` float32: ``d`` of keys and of values.
    rows
        ``[rows]`` sorted positions that the pass computes.
    """

    def __init__(
        self,
        layout: Layout,
        moved: npt.NDArray[np.float32],
        loaded: ReusableModel,
        rows: npt.NDArray[np.int64],
    ) -> None:
        device = loaded.device
        self._kinds = loaded.architecture.rope_kinds
        self._end = layout.query_start
        self._tables = loaded.rotary.tables(self._kinds, torch.arange(self._end, device=device))
        self._keys, self._values = (
            _Followers(layout, rows, far, self._end, device) for far in moved
        )

    def __call__(
        self,
        layer: int,
        rows: tuple[torch.Tensor, torch.Tensor],
        fresh: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Move the chunks' rows in place; see :class:`ragkv.splice.buffer.BeforeWrite`."""
        keys, values = (part[:, : self._end] for part in rows)
        table = self._tables[self._kinds[layer]]
        moved = unrotate(self._keys.moved(keys, fresh[0]), table.at(self._keys.probes))
        add_rotated(keys, self._keys.follow(moved), table)
        values += self._values.follow(self._values.moved(values, fresh[1]))


class _Followers:
    """The probes of all chunks, by keys or by values, and who follows them how far."""

    def __init__(
        self,
        layout: Layout,
        rows: npt.NDArray[np.int64],
        far: npt.NDArray[np.float32],
        end: int,
        device: torch.device,
    ) -> None:
        cached = layout.cached
        is_row = np.isin(cached, rows)
        chunk_of, share = np.zeros(end, dtype=np.int64), np.zeros(end, dtype=np.float32)
        probes = [np.empty(0, dtype=np.int64)]
        for index, piece in enumerate(layout.placed):
            own = np.searchsorted(cached, piece.slots[piece.slots >= layout.exact])
            followers = own[~is_row[own]]
            chunk_of[cached[own]] = index
            share[cached[followers]] = np.minimum(far[followers], 1)
            order = own[np.argsort(-far[own], kind="stable")]
            head = order[np.logical_and.accumulate(is_row[order])]
            probes.append(cached[head if len(head) else own[is_row[own]]])
        found = np.sort(np.concatenate(probes))
        counts = np.bincount(chunk_of[found], minlength=max(1, len(layout.placed)))
        self.probes = to_device(found, device)
        self._here = to_device(np.searchsorted(rows, found), device)
        self._chunks = to_device(chunk_of[found], device)
        self._counts = to_device(np.maximum(counts, 1), device)
        self._chunk_of = to_device(chunk_of, device)
        self._share = to_device(share, device)

    def moved(self, rows: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        """Return ``[kv_heads, probes, head_dim]`` float32: what the probes move by."""
        before, after = rows.index_select(1, self.probes), fresh.index_select(1, self._here)
        return after.float() - before.float()

    def follow(self, moved: torch.Tensor) -> torch.Tensor:
        """Return ``[kv_heads, end, head_dim]`` float32: what each position moves by."""
        means = moved.new_zeros(len(moved), len(self._counts), moved.shape[2])
        means.index_add_(1, self._chunks, moved)
        means /= self._counts[:, None]
        return means.index_select(1, self._chunk_of) * self._share[:, None]
