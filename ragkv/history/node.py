"""The nodes of the prefix tree, and their rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ragkv.model.workspace import uninitialised
from ragkv.prompt.tokens import IntArray

Rows = tuple[torch.Tensor, torch.Tensor]
"""Rotated keys, and values, ``[layers, kv_heads, tokens, head_dim]``."""

Positions = npt.NDArray[np.int64]
Freshness = npt.NDArray[np.float32]
"""``[tokens]``: :data:`EXACT`, :data:`ABSENT`, or the recompute ratio of the prompt that computed
the row over a partly stale context."""

EXACT, ABSENT = 2.0, -1.0

NODE_OVERHEAD = 1024
"""Bytes counted for each node in addition to its arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownRows:
    """Rows of some positions of a path.

    Attributes
    ----------
    positions
        ``[rows]``, sorted.
    freshness
        ``[rows]``, never ABSENT.
    rows
        Keys and values in host memory.
    """

    positions: Positions
    freshness: Freshness
    rows: Rows

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.positions, self.freshness, *self.rows)
        return sum(each.nbytes for each in arrays)

    def between(self, start: int, end: int) -> KnownRows:
        """Return views of the rows of positions ``start`` to ``end``."""
        return self._only(slice(*np.searchsorted(self.positions, (start, end)).tolist()))

    def at_least(self, freshness: float) -> KnownRows:
        """Return the rows of at least this freshness."""
        chosen = np.flatnonzero(self.freshness >= freshness)
        if len(chosen) == len(self.positions):
            return self
        if len(chosen) and chosen[-1] - chosen[0] + 1 == len(chosen):
            return self._only(slice(int(chosen[0]), int(chosen[-1]) + 1))
        return self._only(chosen)

    def _only(self, which: slice | Positions) -> KnownRows:
        index = which if isinstance(which, slice) else torch.from_numpy(which)
        keys, values = (part[:, :, index] for part in self.rows)
        return KnownRows(self.positions[which], self.freshness[which], (keys, values))


NOTHING = KnownRows(np.zeros(0, np.int64), np.zeros(0, np.float32), (torch.zeros(0),) * 2)


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A run of tokens, positions ``start`` to ``end``, that prompts share.

    Attributes
    ----------
    known
        Rows of some or all of its tokens. Replaced, never modified: requests can be reading them.
    children
        By first token.
    digest
        A hash of the path's tokens and the node's own hash: an evicted node that returns has the
        same one.
    prompts
        End positions of prompts, after ``start`` and up to ``end``.
    """

    ids: IntArray
    start: int
    known: KnownRows
    parent: PrefixNode | None
    digest: int = 0
    children: dict[int, PrefixNode] = field(default_factory=dict)
    prompts: set[int] = field(default_factory=set)

    def __hash__(self) -> int:
        return self.digest

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.known.nbytes + self.ids.nbytes + NODE_OVERHEAD

    def reached(self, ids: IntArray) -> int:
        """Return the position up to which a prompt's tokens equal the node's."""
        rest = ids[self.start : self.end]
        different = np.flatnonzero(self.ids[: len(rest)] != rest)
        return self.start + (int(different[0]) if len(different) else len(rest))

    def path(self) -> list[PrefixNode]:
        """Return the nodes from this one upwards, without the root."""
        out, node = list[PrefixNode](), self
        while node.parent is not None:
            out.append(node)
            node = node.parent
        return out


@dataclass(frozen=True, eq=False)
class PrefixMatch:
    """The rows in the tree of a prompt's longest known prefix.

    Eviction does not affect it.

    Attributes
    ----------
    parts
        In the order of the path.
    prompt_end
        End of the longest earlier prompt that is a prefix of this one; 0 for none.
    """

    parts: tuple[KnownRows, ...]
    prompt_end: int = 0

    @cached_property
    def positions(self) -> Positions:
        """``[rows]``, sorted."""
        return np.concatenate([np.zeros(0, np.int64), *(part.positions for part in self.parts)])

    @cached_property
    def freshness(self) -> Freshness:
        """``[rows]``."""
        return np.concatenate([np.zeros(0, np.float32), *(part.freshness for part in self.parts)])

    @property
    def is_exact(self) -> npt.NDArray[np.bool_]:
        """``[rows]``."""
        return self.freshness >= EXACT

    @property
    def exact(self) -> int:
        """Number of leading tokens with exact rows."""
        exact = self.positions[self.is_exact]
        gaps = np.flatnonzero(exact != np.arange(len(exact)))
        return int(gaps[0]) if len(gaps) else len(exact)

    def at_least(self, freshness: float) -> PrefixMatch:
        """Return the rows of at least this freshness."""
        return self._of(part.at_least(freshness) for part in self.parts)

    def between(self, start: int, end: int) -> PrefixMatch:
        """Return the rows of the positions ``start`` to ``end``."""
        return self._of(part.between(start, end) for part in self.parts)

    def _of(self, parts: Iterable[KnownRows]) -> PrefixMatch:
        return PrefixMatch(tuple(part for part in parts if len(part.positions)), self.prompt_end)

    @property
    def rows(self) -> Rows:
        """Concatenated copies of all rows."""
        keys, values = zip(*(part.rows for part in self.parts), strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def copy_rows(rows: Rows, which: slice | Positions) -> Rows:
    """Return host copies of some tokens' rows."""

    def copied(part: torch.Tensor) -> torch.Tensor:
        if isinstance(which, slice):
            part = part[:, :, which]
        else:
            part = part.index_select(2, torch.from_numpy(which).to(part.device))
        return uninitialised(part.shape, part.dtype).copy_(part)

    return copied(rows[0]), copied(rows[1])
