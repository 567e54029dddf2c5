"""The prefix tree over token ids."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from ragkv.history.node import (
    ABSENT,
    NODE_OVERHEAD,
    NOTHING,
    Freshness,
    KnownRows,
    Positions,
    PrefixMatch,
    PrefixNode,
    Rows,
    copy_rows,
)
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.memory import is_out_of_memory
from ragkv.model.workspace import uninitialised
from ragkv.prompt.tokens import IntArray
from ragkv.store.tiers.pgdsf import PGDSF

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ComputedPrompt:
    """A finished prompt, with or without its answer, and its cache.

    Attributes
    ----------
    ids
        The prompt's tokens, then those tokens of the answer that have rows, ``[tokens]``.
    freshness
        ``[tokens]``; rows that are not to be kept are ABSENT.
    rows
        The cache's keys and values, at least up to position ``len(ids)``. No longer modified.
    model
        The model's fingerprint.
    root
        As in :meth:`PrefixTree.match`.
    first
        Position of the first of ``rows``.
    prompt
        Number of the prompt's tokens; 0 if it was not a request.
    """

    ids: IntArray
    freshness: Freshness
    rows: Rows
    model: Fingerprint
    root: Hashable = None
    first: int = 0
    prompt: int = 0

    def up_to(self, end: int | None) -> ComputedPrompt:
        """Return its first ``end`` tokens, None for all."""
        if end is None or end >= len(self.ids):
            return self
        prompt = self.prompt if self.prompt <= end else 0
        return replace(self, ids=self.ids[:end], freshness=self.freshness[:end], prompt=prompt)


class PrefixTree:
    """Rows of prompts and answers in memory, within a budget.

    RAGCache's knowledge tree (arXiv 2404.12457, section 5.1) as a radix tree over token ids instead
    of documents. A path can have rows of only some tokens: stale rows belong to the chunks' entries
    and are not kept. Of two rows for one position, the fresher one is kept. Nodes are always in
    host memory. The tree is thread-safe.

    Parameters
    ----------
    budget
        Bytes. No rows of a larger prompt are kept.
    costs
        Returns the cost of computing ``(cached, new)`` tokens, by which PGDSF ranks the nodes; None
        counts tokens. Only leaves are evicted.
    """

    def __init__(self, budget: int, costs: Callable[[int, int], float] | None = None) -> None:
        self.budget = budget
        self._costs = costs
        self._lock = threading.Lock()
        self._pending: deque[ComputedPrompt] = deque()
        self._roots: dict[Hashable, PrefixNode] = {}
        self._model: Fingerprint | None = None
        self._policy = PGDSF()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._policy.nbytes

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._policy)

    # ---- for requests

    def match(self, ids: IntArray, model: Fingerprint, root: Hashable = None) -> PrefixMatch:
        """Return the rows of the longest known prefix of ``ids`` ``[tokens]``.

        Parameters
        ----------
        model
            The model's fingerprint; rows of a different one are dropped.
        root
            Prompts with different roots share no rows.
        """
        with self._lock:
            self._settle(model)
            node, at, prompt_end = self._roots.get(root), 0, 0
            parts = list[KnownRows]()
            while node is not None and at == node.end:
                node = node.children.get(int(ids[at])) if at < len(ids) else None
                if node is not None:
                    at = node.reached(ids)
                    parts.append(node.known.between(node.start, at))
                    prompt_end = max((end for end in node.prompts if end <= at), default=prompt_end)
                    self._policy.hit(node)
            return PrefixMatch(tuple(part for part in parts if len(part.positions)), prompt_end)

    def add(self, computed: ComputedPrompt) -> None:
        """Queue a prompt's rows; :meth:`settle` or :meth:`match` copies them."""
        self._pending.append(computed)

    def settle(self, model: Fingerprint) -> None:
        """Copy the queued rows."""
        with self._lock:
            self._settle(model)

    def cut(self, first: Callable[[IntArray], int], reach: int) -> None:
        """Drop the rest of each path from the position where ``first`` finds a match.

        A match has up to ``reach`` tokens.
        """
        with self._lock:
            waiting = [(root, root.ids) for root in self._roots.values()]
            while waiting:
                node, before = waiting.pop()
                ids = np.concatenate([before, node.ids])
                at = node.end - len(ids) + first(ids)
                if at == node.end:
                    waiting += [(child, ids[-reach:]) for child in node.children.values()]
                elif node in self._policy:  # not if a sibling path was cut above it
                    while at < node.start and node.parent is not None:
                        node = node.parent
                    if at > node.start:
                        node.known = node.known.between(node.start, at)
                        path = np.concatenate([each.ids for each in node.path()[::-1]])
                        with _memory_may_lack():
                            self._split(node, at, path)
                    self._drop(node)

    def clear(self) -> None:
        """Drop all rows."""
        with self._lock:
            self._pending.clear()
            self._clear()

    # ---- under the lock

    def _settle(self, model: Fingerprint) -> None:
        if model != self._model:
            self._clear()
            self._model = model
        while self._pending:
            computed = self._pending.popleft()
            if computed.model == model:
                with _memory_may_lack(), torch.no_grad():
                    self._insert(computed)

    def _clear(self) -> None:
        self._policy = PGDSF()
        self._roots = {}

    def _insert(self, new: ComputedPrompt) -> None:
        if _bytes_of(new) > self.budget:
            return
        if new.root not in self._roots:
            self._roots[new.root] = PrefixNode(new.ids[:0], 0, NOTHING, None)
        node, at = self._roots[new.root], 0
        try:
            while at < len(new.ids):
                child = node.children.get(int(new.ids[at]))
                if child is None:
                    kept = at + np.flatnonzero(new.freshness[at:] > ABSENT)
                    child = self._enter(new.ids, at, len(new.ids), _taken(new, kept), node)
                else:
                    at = child.reached(new.ids)
                    if at < min(child.end, len(new.ids)):
                        child = self._split(child, at, new.ids)
                    self._improve(child, new)
                if child.start < new.prompt <= child.end:
                    child.prompts.add(new.prompt)
                node, at = child, child.end
        finally:  # also without memory for all rows
            self._trim(node)

    def _improve(self, node: PrefixNode, new: ComputedPrompt) -> None:
        """Replace rows by a prompt's fresher ones."""
        known, end = node.known, min(node.end, len(new.ids))
        here = np.full(end - node.start, ABSENT, np.float32)
        inside = known.positions < end
        here[known.positions[inside] - node.start] = known.freshness[inside]
        better = node.start + np.flatnonzero(new.freshness[node.start : end] > here)
        if len(better):
            kept = np.flatnonzero(~np.isin(known.positions, better))
            self._set(node, _joined(known, kept, _taken(new, better)))

    def _split(self, node: PrefixNode, at: int, ids: IntArray) -> PrefixNode:
        """Split a node; it becomes the lower part. Return the upper part."""
        parent, known = node.parent, node.known
        if parent is None:
            raise RuntimeError("the root is never split")
        # copy both before any change: memory can run out for the second
        above, below = (
            _copied(known.between(*part)) for part in ((node.start, at), (at, node.end))
        )
        upper = self._enter(ids, node.start, at, above, parent)
        node.ids, node.start, node.parent = node.ids[at - node.start :].copy(), at, upper
        upper.children[int(node.ids[0])] = node
        upper.prompts = {end for end in node.prompts if end <= at}
        node.prompts -= upper.prompts
        self._set(node, below)
        return upper

    def _enter(
        self, ids: IntArray, start: int, end: int, known: KnownRows, parent: PrefixNode
    ) -> PrefixNode:
        """Add a child."""
        node = PrefixNode(ids[start:end].copy(), start, known, parent, hash(ids[:end].tobytes()))
        parent.children[int(ids[start])] = node
        self._set(node, known)
        return node

    def _set(self, node: PrefixNode, known: KnownRows) -> None:
        node.known = known
        tokens = len(node.ids)
        cost = float(tokens) if self._costs is None else self._costs(node.start, tokens)
        self._policy.insert(node, node.nbytes, cost, tokens)

    def _trim(self, spared: PrefixNode) -> None:
        """Evict the least valuable leaves down to the budget, none on the path of ``spared``."""
        path = set(spared.path())
        while self._policy.nbytes > self.budget:
            before = len(self)
            for node in self._policy.victims(self._policy.nbytes):
                if isinstance(node, PrefixNode) and not node.children and node not in path:
                    self._policy.evict(node)
                    self._drop(node)
                    if self._policy.nbytes <= self.budget:
                        break
            if len(self) == before:  # the path itself can exceed the budget
                path.clear()

    def _drop(self, node: PrefixNode) -> None:
        """Drop a node and its descendants."""
        if node.parent is not None:
            del node.parent.children[int(node.ids[0])]
        gone = [node]
        for each in gone:
            gone += each.children.values()
            self._policy.remove(each)
            each.known = NOTHING  # the policy can still refer to it


@contextmanager
def _memory_may_lack() -> Iterator[None]:
    """Log and suppress a lack of memory: then fewer rows are kept, and no request fails."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _log.warning(
            "an answer's rows were not kept: %s", str(error)
        )  # a handler can keep the record


def _taken(new: ComputedPrompt, positions: Positions) -> KnownRows:
    """Return copies of some of a prompt's rows."""
    rows = copy_rows(new.rows, positions - new.first)
    return KnownRows(positions, new.freshness[positions], rows)


def _copied(known: KnownRows) -> KnownRows:
    """Return copies, which keep no larger tensor in memory."""
    return KnownRows(known.positions, known.freshness, copy_rows(known.rows, slice(None)))


def _joined(known: KnownRows, kept: Positions, added: KnownRows) -> KnownRows:
    """Return the kept and the added rows, sorted by position."""
    positions = np.concatenate([known.positions[kept], added.positions])
    freshness = np.concatenate([known.freshness[kept], added.freshness])
    order = np.argsort(positions)
    into = torch.split(torch.from_numpy(np.argsort(order)), [len(kept), len(added.positions)])
    old = known.rows if len(kept) == len(known.positions) else copy_rows(known.rows, kept)

    def joined(*parts: torch.Tensor) -> torch.Tensor:
        layers, heads, _, width = parts[0].shape
        out = uninitialised((layers, heads, len(order), width), parts[0].dtype)
        for at, part in zip(into, parts, strict=True):
            out.index_copy_(2, at, part)
        return out

    keys, values = (joined(*parts) for parts in zip(old, added.rows, strict=True))
    return KnownRows(positions[order], freshness[order], (keys, values))


def _bytes_of(new: ComputedPrompt) -> int:
    """Return an upper bound of a prompt's bytes: its rows and the overhead of two nodes."""
    layers, heads, _, width = new.rows[0].shape
    row = 2 * layers * heads * width * new.rows[0].element_size() + 12
    kept = int((new.freshness > ABSENT).sum())
    return kept * row + new.ids.nbytes + 2 * NODE_OVERHEAD
