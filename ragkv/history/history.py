"""History: rows of an engine's earlier prompts and answers, found by token ids."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from ragkv.chunk.encode import unrotated
from ragkv.chunk.kv import ChunkKV
from ragkv.history.node import ABSENT, EXACT, PrefixMatch, Rows
from ragkv.history.tree import ComputedPrompt, PrefixTree
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.find import MIN_HEAD
from ragkv.prompt.render import Rendered
from ragkv.prompt.tokens import IntArray, tokenize
from ragkv.store.types import TierUse

MOST_DROPPED = 256
"""Deletions kept in memory. Rows of prompts that began before the oldest are not kept."""
EDGE = 4
"""Characters at both ends of a spelled text that its neighbours can change."""


class _Spelled(dict[int, str]):
    """A cache of the strings of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        self[token] = spelled = str(self._tokenizer.convert_ids_to_tokens(token))
        return spelled


class Speller:
    """Joins the strings that a tokenizer has for tokens.

    The result does not depend on how a text was split into tokens, e.g. at a chunk's first words
    after a blank.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._spelled = _Spelled(tokenizer)

    def head(self, text: str) -> str:
        """Return the spelling that all prompts with a chunk contain, even a truncated one."""
        ids = tokenize(Rendered(text[:MIN_HEAD], add_special_tokens=False), self._tokenizer).ids
        return self._text(ids)[EDGE:-EDGE]

    def first(self, heads: Sequence[str], ids: IntArray) -> int:
        """Return the index of the first head's beginning in ``[tokens]``, or slightly before it.

        Without a head, this is the number of tokens.
        """
        text = self._text(ids)
        places = [at for at in map(text.find, heads) if at >= 0]
        if not places:
            return len(ids)
        ends = np.cumsum([len(self._spelled[each]) for each in ids.tolist()])
        return int(np.searchsorted(ends, min(places) - EDGE, side="right"))

    def _text(self, ids: IntArray) -> str:
        return "".join(map(self._spelled.__getitem__, ids.tolist()))


class History:
    """Rows of one model's earlier prompts and answers. It knows only token ids.

    Prompts beyond the position limit of a model with two rotary tables (longrope) share no rows
    with shorter prompts.

    Parameters
    ----------
    tree
        None keeps no rows.
    current
        Returns the model's current fingerprint.
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
        """Whether rows are kept."""
        return self._tree is not None

    def is_beyond(self, tokens: int) -> bool:
        """Whether all keys of a prompt of this length are rotated by the second table."""
        return self._loaded.architecture.is_beyond(tokens)

    # ---- lookups

    def find(
        self, ids: IntArray, model: Fingerprint, freshness: float, *, exact_to: int
    ) -> PrefixMatch:
        """Return the rows that a prompt can reuse; never those of its last token.

        Parameters
        ----------
        ids
            The whole prompt, ``[tokens]``.
        model
            The fingerprint of chunks behind its sink.
        freshness
            The least freshness: the prompt's recompute ratio, or EXACT.
        exact_to
            The end of the prompt's chunks. If all rows before it are exact, only exact rows are
            returned.
        """
        if self._tree is None:
            return PrefixMatch(())
        root = self.is_beyond(len(ids))
        found = self._tree.match(ids[:-1], rows_of(model), root).at_least(freshness)
        return found.at_least(EXACT) if found.exact >= exact_to else found

    def exact_rows(self, ids: IntArray, model: Fingerprint) -> PrefixMatch:
        """Return the exact rows of a path of token ids ``[tokens]``."""
        if self._tree is None:
            return PrefixMatch(())
        return self._tree.match(ids, rows_of(model), root=False).at_least(EXACT)

    def exact_chunk(
        self, text: str, ids: IntArray, offsets: IntArray, model: Fingerprint
    ) -> ChunkKV | None:
        """Return the chunk at the end of a path, with unrotated keys; None if a row is missing.

        Parameters
        ----------
        ids
            The path up to the chunk's last token, ``[path]``.
        offsets
            The chunk's offsets, ``[tokens, 2]``.
        """
        first = len(ids) - len(offsets)
        known = self.exact_rows(ids, model).between(first, len(ids))
        if not len(offsets) or len(known.positions) < len(offsets):
            return None
        chunk = ChunkKV(text, ids[first:], offsets, *known.rows)
        return unrotated(chunk, first, self._loaded)

    # ---- additions

    def keep(self, computed: ComputedPrompt, begun: float) -> None:
        """Keep a prompt's rows, without those of texts deleted after ``begun``; copy them later.

        If the prompt is within the position limit, rows of an answer beyond it are omitted.
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
        """Keep the exact rows of a path from position ``first``, as :meth:`keep` does."""
        freshness = np.full(len(ids), EXACT, np.float32)
        freshness[:first] = ABSENT
        self.keep(ComputedPrompt(ids, freshness, rows, rows_of(model), False, first), begun)
        self.settle()

    def count_hit(self) -> None:
        """Count a prompt that reused rows."""
        self._hits += 1

    def settle(self) -> None:
        """Copy rows of finished prompts into the tree; this frees the prompts' buffers."""
        if self._tree is not None:
            self._tree.settle(self._current())

    # ---- deletions

    def drop(self, texts: Sequence[str]) -> None:
        """Drop the rows of texts and all rows behind them, also those of running prompts."""
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
        """Drop all rows; keep none of the running prompts."""
        with self._lock:
            self._cleared_at = time.perf_counter()
            if self._tree is not None:
                self._tree.clear()

    def in_use(self) -> tuple[TierUse, ...]:
        """Return the bytes in use and the number of prompts that reused rows."""
        return () if self._tree is None else (TierUse("prompts", self._tree.nbytes, self._hits),)


def rows_of(model: Fingerprint) -> Fingerprint:
    """Return the fingerprint of rows in a prompt: without sink and codec."""
    return replace(model, sink="", codec="raw")
