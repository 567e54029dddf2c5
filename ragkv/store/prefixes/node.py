"""A node of the tree: a run of tokens with their rows, and which prompts repaired rows serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from ragkv.model.memory import uninitialised
from ragkv.prompt.tokens import IntArray

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys, rotated at their positions, and values: ``[layers, kv_heads, tokens, head_dim]``."""

NODE_OVERHEAD = 1024
"""Bytes counted for each node beside its arrays."""


@dataclass(frozen=True, slots=True)
class RepairTerms:
    """How a prompt's rows were repaired, or are to be.

    Attributes
    ----------
    settings
        What has to be equal: the method, the sink, and whatever else changes its choice.
    ratio
        The requested recompute ratio.
    """

    settings: tuple[object, ...]
    ratio: float | Literal["auto"]

    def serve(self, wanted: RepairTerms) -> bool:
        """Whether rows of these terms may serve a prompt of the wanted ones.

        Not where more was to be recomputed than was; at ratio 1 only exact rows will do.
        """
        if self.settings != wanted.settings:
            return False
        if isinstance(self.ratio, str) or isinstance(wanted.ratio, str):
            return self.ratio == wanted.ratio
        return wanted.ratio <= self.ratio and wanted.ratio < 1


@dataclass(slots=True, eq=False)
class PrefixNode:
    """Tokens ``start`` to ``end`` of all the prompts that go through it.

    Attributes
    ----------
    rows
        Never written to: a request may be reading them. A split replaces them by copies.
    terms
        Of a *turn*: the repaired rows of a prompt, from its first stale one to its end. It is used
        whole or not at all, by prompts that its terms serve. None for every other node: it may be
        used in part, and be split.
    children
        By first token, where ``end`` is reached.
    turns
        They begin anywhere in the node.
    prompts
        Positions in the node where a prompt ended whose rows are exact.
    digest
        A number of the path's content; the node's hash, so that a policy knows it again.
    alive
        Whether it is in the tree.
    """

    ids: IntArray
    start: int
    rows: Rows
    parent: PrefixNode | None
    digest: int = 0
    terms: RepairTerms | None = None
    children: dict[int, PrefixNode] = field(default_factory=dict)
    turns: list[PrefixNode] = field(default_factory=list)
    prompts: set[int] = field(default_factory=set)
    alive: bool = True

    def __hash__(self) -> int:
        return self.digest

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(part.nbytes for part in self.rows) + self.ids.nbytes + NODE_OVERHEAD

    @property
    def is_leaf(self) -> bool:
        """Whether nothing continues it."""
        return not self.children and not self.turns

    def reached(self, ids: IntArray) -> int:
        """Return the position up to which a prompt that comes to this node agrees with it."""
        rest = ids[self.start : self.end]
        different = np.flatnonzero(self.ids[: len(rest)] != rest)
        return self.start + (int(different[0]) if len(different) else len(rest))

    def path(self) -> list[PrefixNode]:
        """Return the nodes from this one up, without the root."""
        out, node = list[PrefixNode](), self
        while node.parent is not None:
            out.append(node)
            node = node.parent
        return out


@dataclass(frozen=True, slots=True, eq=False)
class PrefixRows:
    """Some of a node's rows, for the positions ``start`` to ``end``."""

    start: int
    end: int
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PrefixMatch:
    """The longest usable prefix of a prompt.

    Its tensors stay whole while it exists, whatever the tree evicts.

    Attributes
    ----------
    length
        Tokens whose rows are used: never the prompt's last.
    exact
        The rows before it are equal to a full prefill's, but for rounding.
    conversation
        Whether the prompt begins with a whole former prompt.
    node, matched
        Where the agreement ends, and the number of tokens that agree.
    """

    parts: tuple[PrefixRows, ...]
    length: int
    exact: int
    conversation: bool
    node: PrefixNode
    matched: int


def copy_rows(rows: Rows, start: int, end: int) -> Rows:
    """Return host copies of some tokens' rows."""

    def copied(part: torch.Tensor) -> torch.Tensor:
        part = part[:, :, start:end]
        return uninitialised(part.shape, part.dtype).copy_(part)

    return copied(rows[0]), copied(rows[1])
