"""The tree: match, insert, split, evict."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import torch

from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.tokens import IntArray
from ragkv.store.prefixes.node import (
    NODE_OVERHEAD,
    PrefixMatch,
    PrefixNode,
    PrefixRows,
    RepairTerms,
    Rows,
    copy_rows,
)
from ragkv.store.tiers.pgdsf import PGDSF

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredPrompt:
    """A prompt, its answer, and the cache that holds their rows.

    Attributes
    ----------
    ids
        ``[tokens]`` of the prompt and, behind it, of the answer as far as it has rows.
    prompt
        Number of the prompt's tokens.
    exact
        Rows before it are equal to a full prefill's; at least ``len(ids)`` if all are.
    rows
        A cache's keys and values, for ``len(ids)`` tokens or more. Not written to any more.
    terms
        How the others were repaired.
    model
        What computed them.
    root
        As in :meth:`PrefixTree.match`.
    continued
        The prefix that the prompt's first rows were copied from.
    """

    ids: IntArray
    prompt: int
    exact: int
    rows: Rows
    terms: RepairTerms
    model: Fingerprint
    root: Hashable = None
    continued: PrefixMatch | None = None

    @property
    def extends_repaired(self) -> bool:
        """Whether it continues rows that are not exact."""
        return self.continued is not None and self.continued.exact < self.continued.length


class PrefixTree:
    """KV of former prompts and answers, in memory, within a budget.

    RAGCache's knowledge tree (arXiv 2404.12457, section 5.1), over token ids in place of
    documents. Exact rows form a radix tree: any prompt that begins with their tokens may use
    them. Repaired rows hang from it as *turns* (:class:`PrefixNode`): what the model saw in one
    conversation. Nodes are in the host's memory, wherever the model is. Threads may share it.

    Parameters
    ----------
    budget
        Bytes. Nothing is kept of a prompt that is larger.
    costs
        What computing ``(cached, new)`` tokens takes, by which PGDSF ranks the nodes; None counts
        tokens. Only leaves are evicted.
    """

    def __init__(self, budget: int, costs: Callable[[int, int], float] | None = None) -> None:
        self.budget = budget
        self._costs = costs
        self._lock = threading.Lock()
        self._pending: deque[AnsweredPrompt] = deque()
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

    def match(
        self, ids: IntArray, terms: RepairTerms, model: Fingerprint, root: Hashable = None
    ) -> PrefixMatch | None:
        """Return the longest prefix of ``ids`` ``[tokens]`` that a prompt of these terms may use.

        Visits at most the nodes of its path, and the turns that begin there.

        Parameters
        ----------
        model
            Rows of another one are dropped.
        root
            Prompts of different roots share nothing.
        """
        with self._lock:
            self._settle(model)
            top = self._roots.get(root)
            if top is None:
                return None
            node, matched = _longest(top, ids, terms)
            found = _match_of(node, matched, min(matched, len(ids) - 1))
            for used in node.path():
                self._policy.hit(used)
            return found if found.length else None

    def add(self, answered: AnsweredPrompt) -> None:
        """Keep a prompt's rows, and return at once: :meth:`settle` or a match copies them."""
        self._pending.append(answered)

    def settle(self, model: Fingerprint) -> None:
        """Copy the rows of the prompts that were added."""
        with self._lock:
            self._settle(model)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._pending.clear()
            self._clear()

    # ---- under the lock

    def _settle(self, model: Fingerprint) -> None:
        if model != self._model:
            self._clear()
            self._model = model
        while self._pending:
            answered = self._pending.popleft()
            if answered.model == model:
                try:
                    with torch.no_grad():
                        self._insert(answered)
                except MemoryError as error:  # a request never fails for want of memory here
                    _log.warning("an answer's rows were not kept: %s", error)

    def _clear(self) -> None:
        for node in self._policy:
            node.alive = False  # type: ignore[attr-defined]
        self._policy = PGDSF()
        self._roots = {}

    def _insert(self, new: AnsweredPrompt) -> None:
        if _bytes_of(new) > self.budget:
            return
        at, length = 0, len(new.ids)
        if new.root not in self._roots:
            nothing = torch.empty(0)
            self._roots[new.root] = PrefixNode(new.ids[:0], 0, (nothing, nothing), None)
        node = self._roots[new.root]
        if new.continued is not None and new.extends_repaired and new.continued.node.alive:
            node, at = new.continued.node, new.continued.matched
            while node.start >= at and node.parent is not None:  # it was split meanwhile
                node = node.parent
        else:
            at = length if new.exact >= new.prompt else new.exact
            node = self._extend(node, new, at)
        if at < new.prompt:
            node = self._turn(node, at, new)
        elif not new.extends_repaired:
            _holder(node, new.prompt).prompts.add(new.prompt)
        self._trim(self._extend(node, new, length))

    def _extend(self, node: PrefixNode, new: AnsweredPrompt, end: int) -> PrefixNode:
        """Add the tokens before ``end`` that the tree has not behind ``node``; return the last."""
        while True:
            at = node.reached(new.ids[:end])
            if at == end:
                return node
            if at < node.end:
                node = self._split(node, at, new.ids)
            child = node.children.get(int(new.ids[at]))
            if child is None:
                child = self._add(node, new, at, end)
                node.children[int(new.ids[at])] = child
                return child
            node = child

    def _turn(self, node: PrefixNode, at: int, new: AnsweredPrompt) -> PrefixNode:
        """Add the repaired rows from ``at`` to the prompt's end, unless they are there."""
        for turn in node.turns:
            alike = turn.start == at and turn.terms == new.terms
            if alike and np.array_equal(turn.ids, new.ids[at : new.prompt]):
                return turn
        turn = self._add(node, new, at, new.prompt, new.terms)
        node.turns.append(turn)
        return turn

    def _add(
        self,
        parent: PrefixNode,
        new: AnsweredPrompt,
        start: int,
        end: int,
        terms: RepairTerms | None = None,
    ) -> PrefixNode:
        rows = copy_rows(new.rows, start, end)
        digest = _digest(parent, new.ids[:end], terms)
        node = PrefixNode(new.ids[start:end].copy(), start, rows, parent, digest, terms)
        self._enter(node)
        return node

    def _split(self, node: PrefixNode, at: int, ids: IntArray) -> PrefixNode:
        """Cut a node in two; it becomes the lower one. Return the upper one."""
        cut, parent = at - node.start, node.parent
        if parent is None or node.terms is not None:
            raise RuntimeError("neither the root nor a turn is ever split")
        above, below = copy_rows(node.rows, 0, cut), copy_rows(node.rows, cut, len(node.ids))
        upper = PrefixNode(
            node.ids[:cut].copy(),
            node.start,
            above,
            parent,
            _digest(parent, ids[:at], None),
            None,
            {int(node.ids[cut]): node},
            [turn for turn in node.turns if turn.start <= at],
            {end for end in node.prompts if end <= at},
        )
        for turn in upper.turns:
            turn.parent = upper
        parent.children[int(node.ids[0])] = upper
        node.rows, node.ids = below, node.ids[cut:].copy()
        node.start, node.parent = at, upper
        node.turns = [turn for turn in node.turns if turn.start > at]
        node.prompts = {end for end in node.prompts if end > at}
        self._enter(upper)
        self._enter(node)
        return upper

    def _enter(self, node: PrefixNode) -> None:
        tokens = len(node.ids)
        cost = float(tokens) if self._costs is None else self._costs(node.start, tokens)
        self._policy.insert(node, node.nbytes, cost, tokens)

    def _trim(self, spared: PrefixNode) -> None:
        """Evict leaves of least worth until the budget is kept, none that ``spared`` continues."""
        path = set(spared.path())
        while self._policy.nbytes > self.budget:
            before = len(self)
            for node in self._policy.victims(self._policy.nbytes):
                if isinstance(node, PrefixNode) and node.is_leaf and node not in path:
                    self._evict(node)
                    if self._policy.nbytes <= self.budget:
                        break
            if len(self) == before:  # a path of many small nodes may be too large itself
                path.clear()

    def _evict(self, node: PrefixNode) -> None:
        parent = node.parent
        if parent is None:
            return
        if node.terms is not None:
            parent.turns.remove(node)
        else:
            del parent.children[int(node.ids[0])]
        node.alive = False
        self._policy.evict(node)


def _longest(top: PrefixNode, ids: IntArray, terms: RepairTerms) -> tuple[PrefixNode, int]:
    """Return the node where the longest usable prefix ends, and its length; exact before repaired.

    Turns are used whole: they are compared here before they are visited.
    """
    best, matched, waiting = top, 0, [top]
    while waiting:
        node = waiting.pop()
        at = node.reached(ids)
        if at > matched:
            best, matched = node, at
        waiting += [
            turn
            for turn in node.turns
            if turn.start <= at
            and turn.terms is not None
            and turn.terms.serve(terms)
            and turn.reached(ids) == turn.end
        ]
        child = node.children.get(int(ids[at])) if node.end == at < len(ids) else None
        if child is not None:
            waiting.append(child)  # the next to be visited
    return best, matched


def _match_of(node: PrefixNode, matched: int, length: int) -> PrefixMatch:
    """Collect the rows on the way to a node."""
    parts, exact, conversation, end = list[PrefixRows](), length, False, matched
    for used in node.path():
        stop = min(end, length)
        if used.start < stop:
            rows = (part[:, :, : stop - used.start] for part in used.rows)
            parts.append(PrefixRows(used.start, stop, *rows))
        conversation |= any(mark <= end for mark in used.prompts)
        if used.terms is not None:
            exact, conversation = min(exact, used.start), True
        end = used.start
    return PrefixMatch(tuple(parts[::-1]), length, exact, conversation, node, matched)


def _holder(node: PrefixNode, position: int) -> PrefixNode:
    """Return the node on the way to ``node`` in which a position's last token is."""
    return next((each for each in node.path() if each.start < position), node)


def _digest(parent: PrefixNode, ids: IntArray, terms: RepairTerms | None) -> int:
    """Return a number of a path's content: its tokens, and the turns on it."""
    turns = [each.terms.ratio for each in parent.path() if each.terms is not None]
    return hash((ids.tobytes(), *turns, None if terms is None else terms.ratio))


def _bytes_of(new: AnsweredPrompt) -> int:
    """Return the bytes that a prompt's path takes, at most: three nodes' overhead, and its rows."""
    layers, heads, _, width = new.rows[0].shape
    row = 2 * layers * heads * width * new.rows[0].element_size() + new.ids.itemsize
    return len(new.ids) * row + 3 * NODE_OVERHEAD
