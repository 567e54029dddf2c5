"""Planning: the reuse of chunks and earlier prompts, and the rows that a prompt leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from ragkv.attend.graphs import look_over, repair_forward
from ragkv.chunk.kv import KnownChunk, LayeredKV
from ragkv.config import ReuseConfig
from ragkv.decode.generate import Drawn
from ragkv.engine.plan import Located, LocatedEntry, Plan, Request
from ragkv.engine.prompt_rows import found_rows, left_rows, with_rows, with_versions
from ragkv.history.history import History
from ragkv.history.versions import Versions
from ragkv.ingest.corpus import Corpus
from ragkv.model.memory import release_unused
from ragkv.prompt.find import Span
from ragkv.prompt.tokens import IntArray
from ragkv.recompute.repair import Repair
from ragkv.select import Scene
from ragkv.select.auxiliary import Auxiliary
from ragkv.select.choose import choose
from ragkv.splice.buffer import SplicedCache, spare_rows
from ragkv.splice.layout import Layout, exact_prefix, lay_out
from ragkv.splice.place import splice
from ragkv.store.types import Found

_log = logging.getLogger(__name__)
_SHOWN_TOKENS = 8
_WAITED_S = 0.02
"""Shortest wait for a turn after which earlier prompts' rows are looked up again."""
_HEAD_DIFFERS = (
    "The prompt's head is not the text that chunks were encoded behind ({matched} of {expected} "
    "tokens agree; behind them the sink has {sink!r} and the prompt {prompt!r}). They are reused; "
    "answers are a little closer to full prefill if sink= (or sink_from=) is given this prompt "
    "template's head, here and where chunks are precomputed (docs/results.md, One corpus, several "
    "prompts)."
)


class Planner:
    """Plans prompts over the chunks of one model.

    Parameters
    ----------
    auxiliary
        Returns the auxiliary model of a configuration.
    history
        Rows of earlier prompts; None keeps nothing.
    versions
        The chunks' contextual versions; None uses entries only.
    """

    def __init__(
        self,
        corpus: Corpus,
        auxiliary: Callable[[ReuseConfig], Auxiliary],
        history: History | None = None,
        versions: Versions | None = None,
    ) -> None:
        self.corpus = corpus
        self.loaded = corpus.loaded
        self._history = history or History(corpus.loaded, None, lambda: corpus.sinks.fingerprint)
        self._versions = versions
        self._auxiliary = auxiliary
        self._warned = False

    # ---- find and load

    def find(self, request: Request, located: Located) -> Located:
        """Return the prompt with the known chunks in its text."""
        if request.method.reuse == "none":
            return located
        return replace(located, known=tuple(self.corpus.find(located.text)))

    def load(self, request: Request, located: Located, corrupt: Mapping[str, str]) -> Located:
        """Return the prompt with rows of earlier prompts and the opened entries of its chunks.

        A chunk whose every token was computed by an earlier prompt needs no entry: its rows are in
        memory. An entry is opened unless it takes longer to load than to compute.

        Parameters
        ----------
        corrupt
            Texts whose entries cannot be used, with the reasons.
        """
        if located.known is None:
            return located
        with request.clock.step("load"):
            sink = self.corpus.sinks.configured(request.config)
            located = replace(located, sink=sink)
            located = with_rows(request, located, self._history, self._versions)
            computed = {span for span in located.known or () if located.has_rows(span)}
            missed = {**self._slower(located, computed), **corrupt}
            texts = dict.fromkeys(
                span.text
                for span in located.known or ()
                if span not in computed and span.text not in missed
            )
            opened = dict(zip(texts, self.corpus.open(list(texts), sink), strict=True))
            located = _with_entries(located, computed, opened, missed)
        if self._history.is_beyond(len(located.tokens)):
            unused = tuple((entry.text, "positions") for entry, _, _ in located.entries)
            located = replace(located, entries=(), missed=(*located.missed, *unused))
        if self._versions is not None:
            with request.clock.step("load"):
                located = with_versions(request, located, self._history, self._versions)
        return located

    def _slower(self, located: Located, computed: Collection[Span]) -> dict[str, str]:
        """Return the chunks that take longer to load than to compute, each with that reason."""
        if located.sink is None:
            return {}
        slower: dict[str, str] = {}
        for span in located.known or ():
            own = located.tokens.touching(span.start, span.end)
            size = own.stop - own.start
            if span not in computed and self.corpus.is_slower(span.text, size, located.sink):
                slower[span.text] = "slower"
        return slower

    def has_more(self, request: Request, located: Located) -> bool:
        """Whether earlier prompts computed rows for this one while it waited for its turn."""
        sink, waited = located.sink, request.clock.steps.get("wait", 0.0)
        if sink is None or waited < _WAITED_S:
            return False
        found = found_rows(request, located, self._history)
        before = 0 if located.history is None else len(located.history.positions)
        return found is not None and len(found.positions) > before

    # ---- splice and select

    def plan(self, request: Request, located: Located) -> Plan:
        """Place the entries in the prompt's cache and choose the tokens to recompute."""
        look_over(self.loaded)
        plan = self._splice(request, located)
        return plan if plan.cache is None else self._select(request, plan, plan.cache)

    def _splice(self, request: Request, located: Located) -> Plan:
        """Lay out the prompt and place the entries' rows in its cache."""
        sink, tokens, history = located.sink, located.tokens, located.history
        if sink is None or not (located.entries or history):
            return Plan.full(located)
        with request.clock.step("splice"):
            head = sink.ids[:0] if self._history.is_beyond(len(tokens)) else sink.ids
            layout = lay_out(tokens, head, located.entries, history)
            missed = _unaligned(layout, located)
            if request.method.reuse == "prefix":
                layout = exact_prefix(layout)
            if not layout.exact and not layout.placed and history is None:
                return Plan(located, layout, missed=missed)
            cache = splice(
                layout,
                sink.rows,
                self.loaded,
                spare_rows(request.answer_tokens),
                step=partial(request.clock.step, "splice"),
            )
            return Plan(located, layout, cache, missed, self._head_warnings(layout, head))

    def _select(self, request: Request, plan: Plan, cache: SplicedCache) -> Plan:
        """Choose the tokens to recompute."""
        config, method, layout = request.config, request.method, plan.layout
        with request.clock.step("select"):
            scene = Scene(
                layout=layout,
                text=plan.located.text,
                loaded=self.loaded,
                cache=cache,
                auxiliary=partial(self._auxiliary, config),
            )
            choice = choose(method, scene, config)
            rows = np.sort(np.concatenate([layout.fresh, choice.positions]))
            if request.remote is not None:
                rows = rows[rows < layout.known_end]
            repair = Repair.of(method, layout, choice, rows, self.loaded, shift=cache.shift)
        return replace(plan, choice=choice, repair=repair, rows=rows)

    # ---- compute

    def recompute(self, request: Request, plan: Plan) -> torch.Tensor:
        """Recompute the plan's rows; return the logits after the prompt, ``[vocab]`` float32.

        A device can still compute them: see :meth:`finish`.
        """
        with request.clock.step("recompute"):
            return repair_forward(self.loaded, plan.subset)[0]

    def finish(self, request: Request, plan: Plan) -> None:
        """Wait for the recomputed rows, and record their time."""
        with request.clock.step("recompute"):
            self.loaded.wait()
        self.corpus.record_speed(len(plan.rows), request.clock.steps["recompute"])

    # ---- keep

    def keep(
        self, request: Request, plan: Plan, cache: SplicedCache, drawn: Drawn | None = None
    ) -> None:
        """Keep the rows of a prompt, and of its answer, for later prompts."""
        left = left_rows(
            request, plan, cache, self._history, drawn, lossless=self.corpus.is_lossless
        )
        if left is not None:
            if plan.located.history is not None:
                self._history.count_hit()
            self._history.keep(left, request.clock.started)

    def make_room(self) -> None:
        """Free the device memory that is kept for later requests, the store's tier included."""
        self.corpus.store.make_room()
        release_unused(self.loaded)

    def _head_warnings(self, layout: Layout, sink_ids: IntArray) -> tuple[str, ...]:
        """Return a warning if the prompt's head is not its chunks' sink; log it once."""
        encoded = any(not isinstance(piece.entry, KnownChunk) for piece in layout.placed)
        if layout.sink == len(sink_ids) or not encoded:
            return ()
        at = slice(layout.sink, layout.sink + _SHOWN_TOKENS)
        decode = self.loaded.tokenizer.decode
        message = _HEAD_DIFFERS.format(
            matched=layout.sink,
            expected=len(sink_ids),
            sink=decode(sink_ids[at]),
            prompt=decode(layout.ids[at]),
        )
        if not self._warned:
            self._warned = True
            _log.warning(message)
        return (message,)


def _with_entries(
    located: Located,
    computed: Collection[Span],
    opened: Mapping[str, Found[LayeredKV]],
    missed: Mapping[str, str],
) -> Located:
    """Return the prompt with its usable entries, and the reasons of the unusable ones."""
    entries: list[LocatedEntry] = []
    unusable: list[tuple[str, str]] = []
    for span in located.known or ():
        found = opened.get(span.text) or Found(None, missed.get(span.text, ""))
        if span in computed:
            entries.append((located.known_chunk(span), span.start, span.end))
        elif found.entry is not None:
            entries.append((found.entry, span.start, span.end))
        else:
            unusable.append((span.text, found.reason))
    return replace(
        located,
        entries=tuple(entries),
        missed=tuple(unusable),
        # only precompute() renews an expired chunk
        to_encode=tuple(text for text, why in unusable if why not in ("slower", "expired")),
        to_load=tuple(text for text, why in unusable if why == "slower"),
    )


def _unaligned(layout: Layout, located: Located) -> tuple[tuple[str, str], ...]:
    """Return the entries that share no token with the prompt; encoding them again cannot help."""
    used: set[int] = {id(piece.entry) for piece in layout.placed}
    in_sink = located.tokens.characters(layout.sink)
    return tuple(
        (entry.text, "unaligned")
        for entry, _, end in located.entries
        if id(entry) not in used and end > in_sink
    )
