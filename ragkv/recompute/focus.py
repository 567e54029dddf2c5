"""Focused chunks: the repair of chunks that the query hardly looks at ends between the layers.

Cache-Craft, arXiv 2502.15734, Algorithm 1. The attention that the query pays to each chunk is
summed up layer by layer, and the chunks are sorted by it. Of the gaps between neighbours, as shares
of their sum, the entropy is summed up from the top; where it grows most, the focused chunks end.
Once they are the same for some layers running, the others' tokens leave the pass: in the layers
above they keep their cached keys and values.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.observe import LayerCall, attention_of_last_rows
from ragkv.model.streams import to_device
from ragkv.splice.layout import Layout

Positions = npt.NDArray[np.int64]

FEWEST = 3
"""Of fewer chunks the algorithm splits off none."""


class FocusedChunks:
    """Looks for the focused chunks of one pass; see :class:`ragkv.attend.leaving.Leaving`.

    Parameters
    ----------
    layout
        The prompt's layout, with :data:`FEWEST` chunks or more.
    rows
        ``[rows]`` sorted positions that the pass computes.
    layers
        In so many layers running the focused chunks must be the same.

    Attributes
    ----------
    ended_at
        First layer that computes the focused chunks alone; None: no chunk's repair has ended.
    left
        Sorted positions of the rows that are not computed from there on.
    """

    def __init__(self, layout: Layout, rows: Positions, layers: int) -> None:
        self.ended_at: int | None = None
        self.left: Positions = np.zeros(0, np.int64)
        self._layout, self._rows, self._layers = layout, rows, layers
        self._paid = np.zeros(len(layout.placed))
        self._focused: frozenset[int] = frozenset()
        self._running = 0

    def __call__(self, call: LayerCall) -> Positions | None:
        """Add a layer's attention; return the rows that stay, once the chunks are known."""
        if call.layer == 0:
            self.ended_at, self.left, self._running = None, self._rows[:0], 0
            self._paid[:] = 0
        layout = self._layout
        paid = attention_of_last_rows(call, len(layout) - layout.query_start)
        chunks = [paid[to_device(piece.slots, paid.device)].sum() for piece in layout.placed]
        self._paid += torch.stack(chunks).cpu().numpy()
        focused = focused_chunks(self._paid)
        self._running = 1 + self._running * (focused == self._focused) if focused else 0
        self._focused = focused
        if self._running < self._layers:
            return None
        self.ended_at = call.layer + 1
        others = [piece.slots for at, piece in enumerate(layout.placed) if at not in self._focused]
        self.left = np.intersect1d(self._rows, np.concatenate(others))
        return np.setdiff1d(self._rows, self.left, assume_unique=True)


def focused_chunks(paid: npt.NDArray[np.float64]) -> frozenset[int]:
    """Return which chunks are focused, by Algorithm 1; none where all are paid the same.

    With the gaps ``p_1 ... p_(k-1)`` between the sorted values, as shares of their sum, and
    ``h_i = -sum over j <= i of p_j log p_j``, they are the first ``argmax of h_(i+1) - h_i``
    chunks, i from 1 to k-2; of equal ones the fewest.

    Parameters
    ----------
    paid
        ``[chunks]`` the query's attention to each, :data:`FEWEST` chunks or more.
    """
    order = np.argsort(-paid, kind="stable")
    gaps = -np.diff(paid[order])
    if not gaps.any():
        return frozenset()
    shares = gaps / gaps.sum()
    growth = -shares * np.log(np.where(shares > 0, shares, 1.0))
    return frozenset(order[: int(np.argmax(growth[1:])) + 1].tolist())
