"""Former prompts and answers of an engine: which of their rows a prompt takes, and leaves."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ragkv.chunk.encode import unrotated
from ragkv.chunk.kv import ChunkKV
from ragkv.decode.generate import Drawn
from ragkv.engine.corpus import Corpus, Sink
from ragkv.engine.plan import Plan
from ragkv.engine.request import Request
from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.find import Span
from ragkv.prompt.spelled import EDGE, Speller
from ragkv.prompt.tokens import IntArray, Tokens
from ragkv.select.choose import FLOOR
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Origin
from ragkv.store.base import TierUse
from ragkv.store.prefixes.node import ABSENT, EXACT, Freshness, PrefixMatch, Rows
from ragkv.store.prefixes.tree import ComputedPrompt, PrefixTree

MOST_DROPPED = 256
"""Deletions that are remembered: prompts that began before an earlier one leave nothing."""


class FormerPrompts:
    """What an engine's prompts and answers computed.

    Parameters
    ----------
    tree
        None where nothing is kept.
    """

    def __init__(self, corpus: Corpus, tree: PrefixTree | None) -> None:
        self._corpus = corpus
        self._tree = tree
        self._speller = Speller(corpus.loaded.tokenizer)
        self._hits = 0
        self._lock = threading.Lock()  # of what was dropped when
        self._dropped: list[tuple[float, list[str]]] = []
        self._cleared_at = -math.inf
        self._architecture = corpus.loaded.architecture

    def find(
        self, request: Request, tokens: Tokens, sink: Sink, spans: Sequence[Span]
    ) -> PrefixMatch | None:
        """Return the rows that the prompt takes, if they are more than the sink's.

        Exact rows serve every prompt; others one whose ratio is not above that which they were
        computed with. Behind chunks that are exact now, rows of a time when they were not are
        left aside.
        """
        if self._tree is None or not request.uses_history:
            return None
        wanted = request.config.recompute_ratio
        if wanted == 1:
            wanted = EXACT
        elif wanted == "auto":
            wanted = FLOOR
        root = self.is_beyond(tokens)
        found = self._tree.match(tokens.ids[:-1], model_of(sink), root).at_least(wanted)
        last = spans[-1].end if spans else 0
        if found.exact >= np.searchsorted(tokens.offsets[:, 0], last):
            found = found.at_least(EXACT)
        if not len(found.positions) or found.positions[-1] < len(sink.ids):
            return None
        return found

    def keep(
        self, request: Request, plan: Plan, cache: SplicedCache, drawn: Drawn | None = None
    ) -> None:
        """Keep the rows of a prompt and its answer; they are copied later.

        The answer's last token has no row; rows of steps that did not read everything are left out,
        and what was dropped since the prompt was asked. Without ``drawn``: rows handed over alone.
        """
        sink = plan.located.sink
        if self._tree is None or not request.uses_history or sink is None:
            return
        self._hits += plan.spliced.layout.former is not None
        answer: list[int] = []
        if drawn is not None and drawn.blocks_read == drawn.blocks:
            answer = drawn.token_ids[:-1]
        ids = np.concatenate([plan.ids, np.asarray(answer, dtype=plan.ids.dtype)])
        freshness = self._freshness(plan, len(ids))
        root = self.is_beyond(plan.located.tokens)
        if not root:  # behind the limit, rows are rotated by another table
            ids = ids[: self._architecture.position_limit]
        if drawn is None:
            ids = ids[: plan.spliced.layout.known_end]
        rows, model = (cache.keys, cache.values), model_of(sink)
        freshness = freshness[: len(ids)]
        computed = ComputedPrompt(ids, freshness, rows, model, root, prompt=len(plan.ids))
        self._add(computed, request.clock.started)

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._tree is not None

    def exact_rows(self, ids: IntArray, sink: Sink) -> PrefixMatch:
        """Return the exact rows of a path, ``[tokens]``."""
        if self._tree is None:
            return PrefixMatch(())
        return self._tree.match(ids, model_of(sink), root=False).at_least(EXACT)

    def exact_chunk(
        self, text: str, ids: IntArray, offsets: IntArray, sink: Sink
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
        known = self.exact_rows(ids, sink).between(first, len(ids))
        if not len(offsets) or len(known.positions) < len(offsets):
            return None
        chunk = ChunkKV(text, ids[first:], offsets, *known.rows)
        return unrotated(chunk, first, self._corpus.loaded)

    def keep_exact(
        self, ids: IntArray, rows: Rows, sink: Sink, begun: float, first: int = 0
    ) -> None:
        """Keep exact rows of a path, those of the positions from ``first`` on.

        What was dropped after ``begun`` is left out.
        """
        freshness = np.full(len(ids), EXACT, np.float32)
        freshness[:first] = ABSENT
        computed = ComputedPrompt(ids, freshness, rows, model_of(sink), root=False, first=first)
        self._add(computed, begun)
        self.settle()

    def _add(self, computed: ComputedPrompt, begun: float) -> None:
        with self._lock:
            if self._tree is None or begun <= self._cleared_at:
                return
            heads = [each for at, heads in self._dropped if begun <= at for each in heads]
            end = self._speller.first(heads, computed.ids) if heads else len(computed.ids)
            ids, freshness = computed.ids[:end], computed.freshness[:end]
            prompt = computed.prompt if computed.prompt <= end else 0
            self._tree.add(replace(computed, ids=ids, freshness=freshness, prompt=prompt))

    def settle(self) -> None:
        """Copy what was kept into the tree, so that the prompts' buffers are free again."""
        if self._tree is not None:
            self._tree.settle(self._corpus.fingerprint)

    def drop(self, texts: Sequence[str]) -> None:
        """Forget what begins with some chunks or follows them, also of prompts that run now."""
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
        """Forget everything, and what the prompts that run now would leave."""
        with self._lock:
            self._cleared_at = time.perf_counter()
            if self._tree is not None:
                self._tree.clear()

    def in_use(self) -> tuple[TierUse, ...]:
        """Return the bytes that are kept, and how many prompts took rows of them."""
        return () if self._tree is None else (TierUse("prompts", self._tree.nbytes, self._hits),)

    def is_beyond(self, tokens: Tokens) -> bool:
        """Whether the prompt is so long that all its keys are rotated by the model's other table.

        The table for long sequences (longrope): such prompts share no rows with shorter ones.
        """
        return self._architecture.is_beyond(len(tokens))

    def _freshness(self, plan: Plan, tokens: int) -> Freshness:
        """Return the freshness of a prompt's rows and its answer's, ``[tokens]``.

        Computed rows are exact up to the first position whose row is not. Codecs other than raw
        lose something, even of the first chunk. Rows with sparse attention are not exact.
        """
        layout, origin, repair = plan.spliced.layout, plan.origin, plan.repair
        computed = np.isin(origin, (Origin.RECOMPUTED, Origin.FRESH))
        exact = np.isin(origin, (Origin.SINK, Origin.EXACT))
        if self._corpus.is_lossless:
            exact[: layout.exact] |= origin[: layout.exact] == Origin.CACHED
        others = ~(exact | computed)
        if repair.sparse is not None:
            others[plan.choice.positions] = True
        first = int(np.argmax(others)) if others.any() else tokens
        out = np.full(tokens, plan.choice.ratio, np.float32)
        out[: len(origin)][~computed] = ABSENT
        if layout.former is not None:
            out[layout.former.positions] = layout.former.freshness
        if repair.copies is not None:
            out[repair.copies.taken] = plan.choice.ratio
        out[: len(origin)][exact] = EXACT
        out[:first] = EXACT
        return out


def model_of(sink: Sink) -> Fingerprint:
    """Return the fingerprint of rows that are not stored, and stand in their prompt."""
    return replace(sink.fingerprint, sink="", codec="raw")
