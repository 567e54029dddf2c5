"""Former prompts and answers of an engine: which of their rows a prompt continues, and keeps."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

import numpy as np

from ragkv.decode.generate import Drawn
from ragkv.engine.corpus import Corpus, Sink
from ragkv.engine.plan import Plan
from ragkv.engine.request import Request
from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.tokens import Tokens
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Origin
from ragkv.store.base import TierUse
from ragkv.store.prefixes.node import PrefixMatch, RepairTerms
from ragkv.store.prefixes.tree import AnsweredPrompt, PrefixTree

LEAST_TOKENS = 16
"""Fewer tokens behind the sink, or the first chunk's entry, are not worth a change of plan."""


class Conversations:
    """What the engine's prompts and answers left in its knowledge tree.

    Parameters
    ----------
    tree
        None where nothing is kept.
    """

    def __init__(self, corpus: Corpus, tree: PrefixTree | None) -> None:
        self._corpus = corpus
        self._tree = tree
        self._hits = 0
        self._lock = threading.Lock()  # of when they were cleared
        self._cleared_at = -math.inf
        self._limit = corpus.loaded.architecture.position_limit

    def find(self, request: Request, tokens: Tokens, sink: Sink) -> PrefixMatch | None:
        """Return the rows that the prompt continues, if they are more than the sink's."""
        if self._tree is None or not request.uses_prompts:
            return None
        beyond = self.is_beyond(tokens)
        terms = _terms_of(request, sink)
        found = self._tree.match(tokens.ids, terms, _model_of(sink), root=beyond)
        least = LEAST_TOKENS + (0 if beyond else len(sink.ids))
        if found is None or found.length < least:
            return None
        self._hits += 1
        return found

    def keep(self, request: Request, plan: Plan, cache: SplicedCache, drawn: Drawn) -> None:
        """Keep the rows of a prompt and its answer; they are copied later.

        The answer's last token has no row. Prompts that were asked before :meth:`clear` leave
        none: they may contain what was deleted.
        """
        sink = plan.located.sink
        if self._tree is None or not request.uses_prompts or sink is None:
            return
        ids = np.concatenate([plan.ids, np.asarray(drawn.token_ids[:-1], dtype=plan.ids.dtype)])
        beyond = self.is_beyond(plan.located.tokens)
        if not beyond:  # behind it, rows are rotated by another table
            ids = ids[: self._limit]
        answered = AnsweredPrompt(
            ids,
            len(plan.ids),
            self._exact(plan),
            (cache.keys, cache.values),
            _terms_of(request, sink),
            _model_of(sink),
            root=beyond,
            continued=plan.spliced.layout.continued,
        )
        with self._lock:
            if request.clock.started > self._cleared_at:
                self._tree.add(answered)

    def settle(self) -> None:
        """Copy what was kept into the tree, so that the prompts' buffers are free again."""
        if self._tree is not None:
            self._tree.settle(self._corpus.fingerprint)

    def clear(self) -> None:
        """Forget everything, and what the prompts that run now would leave."""
        with self._lock:
            self._cleared_at = time.perf_counter()
            if self._tree is not None:
                self._tree.clear()

    def in_use(self) -> tuple[TierUse, ...]:
        """Return the bytes that are kept, and how many prompts continued them."""
        return () if self._tree is None else (TierUse("prompts", self._tree.nbytes, self._hits),)

    def is_beyond(self, tokens: Tokens) -> bool:
        """Whether the prompt is so long that all its keys are rotated by the model's other table.

        The table for long sequences (longrope): such prompts share no rows with shorter ones.
        """
        return self._limit is not None and len(tokens) > self._limit

    def _exact(self, plan: Plan) -> int:
        """Return the position before which all rows are a full prefill's.

        That is the first stale row: those behind it attended to it. Codecs other than raw lose
        something, even of the first chunk.
        """
        layout = plan.spliced.layout
        kept = plan.origin == Origin.CACHED
        if self._corpus.is_lossless:
            kept[: layout.exact] = False
        exact = int(np.argmax(kept)) if kept.any() else len(kept)
        continued = layout.continued
        if continued is not None and continued.exact < continued.length:
            exact = min(exact, continued.exact)
        return exact


def _terms_of(request: Request, sink: Sink) -> RepairTerms:
    config = request.config
    settings = (
        request.method,
        sink.ids.tobytes(),
        config.auxiliary_model,
        config.seed,
    )
    return RepairTerms(settings, config.recompute_ratio)


def _model_of(sink: Sink) -> Fingerprint:
    """Return the fingerprint of rows that are not stored, and stand in their prompt."""
    return replace(sink.fingerprint, sink="", codec="raw")
