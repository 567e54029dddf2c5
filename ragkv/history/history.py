"""Rows of an engine's earlier prompts and answers, found by token ids."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ragkv.chunk.encode import unrotated
from ragkv.chunk.kv import ChunkKV
from ragkv.history.node import ABSENT, EXACT, PrefixMatch, Rows
from ragkv.history.tree import ComputedPrompt, PrefixTree
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.spelled import EDGE, Speller
from ragkv.prompt.tokens import IntArray
from ragkv.store.types import TierUse

MOST_DROPPED = 256
"""Deletions in memory: prompts that began before an earlier deletion leave nothing."""


class History:
    """Rows that one model's prompts and answers computed, without knowledge of prompts or chunks.

    Prompts beyond the position limit of a model with two rotary tables (longrope) share no rows
    with shorter prompts.

    Parameters
    ----------
    tree
        None keeps nothing.
    current
        Returns the fingerprint of the model as it is now.
    """

    def __init__(
        self, loaded: ReusableModel, tree: PrefixTree | None, current: Callable[[], Fingerprint]
    ) -> None:
        self._loaded = loaded
        self._tree = tree
        self._current = current
        self._speller = Speller(loaded.tokenizer)
        self._hits = 0
        self._lock = threading.Lock()  # of deletions and their times
        self._dropped: list[tuple[float, list[str]]] = []
        self._cleared_at = -math.inf

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._tree is not None

    def is_beyond(self, tokens: int) -> bool:
        """Whether a prompt of that length has all of its keys rotated by the second table."""
        return self._loaded.architecture.is_beyond(tokens)

    # ---- lookups

    def find(
        self, ids: IntArray, model: Fingerprint, freshness: float, *, exact_to: int
    ) -> PrefixMatch:
        """Return the rows that a prompt can take, all but the last token's.

        Parameters
        ----------
        ids
            ``[tokens]`` of the whole prompt.
        model
            The fingerprint of its sink's chunks.
        freshness
            The least: the prompt's recompute ratio, or EXACT.
        exact_to
            Position from which on rows are taken only if exact, once all before it are exact: the
            end of the prompt's chunks.
        """
        if self._tree is None:
            return PrefixMatch(())
        root = self.is_beyond(len(ids))
        found = self._tree.match(ids[:-1], rows_of(model), root).at_least(freshness)
        return found.at_least(EXACT) if found.exact >= exact_to else found

    def exact_rows(self, ids: IntArray, model: Fingerprint) -> PrefixMatch:
        """Return the exact rows of a path, ``[tokens]``."""
        if self._tree is None:
            return PrefixMatch(())
        return self._tree.match(ids, rows_of(model), root=False).at_least(EXACT)

    def exact_chunk(
        self, text: str, ids: IntArray, offsets: IntArray, model: Fingerprint
    ) -> ChunkKV | None:
        """Return the chunk at the end of a path, keys not rotated; None where a row is missing.

        Parameters
        ----------
        ids
            ``[path]``: up to the chunk's last token.
        offsets
            ``[tokens, 2]`` of the chunk.
        """
        first = len(ids) - len(offsets)
        known = self.exact_rows(ids, model).between(first, len(ids))
        if not len(offsets) or len(known.positions) < len(offsets):
            return None
        chunk = ChunkKV(text, ids[first:], offsets, *known.rows)
        return unrotated(chunk, first, self._loaded)

    # ---- additions

    def keep(self, computed: ComputedPrompt, begun: float) -> None:
        """Keep a prompt's rows, except of texts that were dropped after ``begun``; copy them later.

        Rows beyond the position limit are left out where the prompt itself is shorter.
        """
        if not computed.root:
            computed = computed.up_to(self._loaded.architecture.position_limit)
        with self._lock:
            if self._tree is None or begun <= self._cleared_at:
                return
            heads = [each for at, heads in self._dropped if begun <= at for each in heads]
            if heads:
                computed = computed.up_to(self._speller.first(heads, computed.ids))
            self._tree.add(computed)

    def keep_exact(
        self, ids: IntArray, rows: Rows, model: Fingerprint, begun: float, first: int = 0
    ) -> None:
        """Keep exact rows of a path, those of the positions from ``first`` on, as :meth:`keep`."""
        freshness = np.full(len(ids), EXACT, np.float32)
        freshness[:first] = ABSENT
        self.keep(ComputedPrompt(ids, freshness, rows, rows_of(model), False, first), begun)
        self.settle()

    def count_hit(self) -> None:
        """Count a prompt that took rows."""
        self._hits += 1

    def settle(self) -> None:
        """Copy the rows of finished prompts into the tree, which frees the prompts' buffers."""
        if self._tree is not None:
            self._tree.settle(self._current())

    # ---- deletions

    def drop(self, texts: Sequence[str]) -> None:
        """Drop what begins with some texts or follows them, also of prompts that run now."""
        if self._tree is None:
            return
        heads = list(map(self._speller.head, texts))
        with self._lock:
            self._dropped.append((time.perf_counter(), heads))
            if len(self._dropped) > MOST_DROPPED:
                self._cleared_at, _ = self._dropped.pop(0)
            self.settle()
            self._tree.cut(partial(self._speller.first, heads), max(map(len, heads)) + EDGE)

    def clear(self) -> None:
        """Drop everything, and what the prompts that run now would leave."""
        with self._lock:
            self._cleared_at = time.perf_counter()
            if self._tree is not None:
                self._tree.clear()

    def in_use(self) -> tuple[TierUse, ...]:
        """Return the bytes in use, and the number of prompts that took rows."""
        return () if self._tree is None else (TierUse("prompts", self._tree.nbytes, self._hits),)


def rows_of(model: Fingerprint) -> Fingerprint:
    """Return the fingerprint of rows in their prompt: of no sink's entries, and of no codec."""
    return replace(model, sink="", codec="raw")
