"""The parts of a method besides the recomputation of chosen rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ragkv.attend.forward import SubsetPass
from ragkv.attend.sparse_rows import SparseRows
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.tokens import IntArray
from ragkv.recompute.copy_repair import CopyRepair
from ragkv.recompute.drift import Drift
from ragkv.select.choose import Choice
from ragkv.select.method import Method
from ragkv.splice.buffer import BeforeWrite, Shift, SplicedCache
from ragkv.splice.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Repair:
    """A method's parts for one prompt.

    Attributes
    ----------
    drift
        Moves the rows that are not recomputed.
    sparse
        Sparse attention of recomputed rows in the upper layers.
    copies
        Repair of copies during decoding.
    """

    drift: BeforeWrite | None = None
    sparse: SparseRows | None = None
    copies: CopyRepair | None = None

    @classmethod
    def of(
        cls,
        method: Method,
        layout: Layout,
        choice: Choice,
        rows: npt.NDArray[np.int64],
        loaded: ReusableModel,
        *,
        shift: Shift,
    ) -> Self:
        """Prepare the method's parts; none if no stale token remains.

        Parameters
        ----------
        rows
            ``[rows]`` sorted positions that the pass computes.
        shift
            Differences of earlier prompts' rows from the entries'.
        """
        if not len(layout.stale(rows)):
            return cls()
        drift: BeforeWrite | None = None
        if method.drift and (len(choice.positions) or len(shift.positions)):
            drift = Drift(layout, rows, loaded, shift)
        if not len(choice.positions):
            return cls(drift=drift)
        if choice.mover is not None:
            drift = choice.mover(rows)
        sparse = copies = None
        if method.sparse is not None and loaded.device.type == "cpu":
            sparse = SparseRows(layout, rows, method.sparse, loaded)
        if method.lookup is not None and choice.scores is not None:
            copies = CopyRepair(layout, rows, choice.scores, method.lookup)
        return cls(drift, sparse, copies)

    def subset(self, ids: IntArray, rows: npt.NDArray[np.int64], cache: SplicedCache) -> SubsetPass:
        """Return the pass that recomputes the rows."""
        return SubsetPass(ids, rows, cache, drift=self.drift, sparse=self.sparse)
