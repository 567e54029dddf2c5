"""One prompt's way: find and load, splice, select, recompute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from transformers.cache_utils import Cache

from ragkv.attend.forward import subset_forward
from ragkv.chunk.kv import KnownChunk, LayeredKV
from ragkv.config import ReuseConfig
from ragkv.decode.generate import Drawn
from ragkv.engine.full import FullPrefill
from ragkv.engine.plan import Located, LocatedEntry, Plan, Spliced
from ragkv.engine.prompt_rows import found_rows, left_rows, restore_versions, with_versions
from ragkv.engine.remote import RemoteAnswer
from ragkv.engine.request import Request
from ragkv.engine.requests import RequestQueue, Turn
from ragkv.history.history import History
from ragkv.history.node import Rows
from ragkv.history.versions import Versions
from ragkv.ingest.corpus import Corpus
from ragkv.model.loaded import ReusableModel
from ragkv.model.memory import is_out_of_memory, release_calls, release_unused
from ragkv.prompt.tokens import IntArray
from ragkv.recompute.repair import Repair
from ragkv.select import Scene
from ragkv.select.auxiliary import Auxiliary
from ragkv.select.choose import choose
from ragkv.splice.buffer import SplicedCache, spare_rows
from ragkv.splice.layout import Layout, exact_prefix, lay_out
from ragkv.splice.place import splice
from ragkv.store.entry.lazy import CorruptEntryError, LazyKV, ReadAhead
from ragkv.store.types import Found

_log = logging.getLogger(__name__)
_SHOWN_TOKENS = 8
_WAITED_S = 0.02
"""What was found before a longer wait is looked for again."""
_MOST_PRELOADED = 4
"""Waiting requests whose entries are read before their turn; the others' are read in it."""
_NO_IDS = np.zeros(0, dtype=np.int32)
_HEAD_DIFFERS = (
    "The prompt's head is not the text that chunks were encoded behind ({matched} of {wanted} "
    "tokens agree; behind them the sink has {sink!r} and the prompt {prompt!r}). They are reused; "
    "answers are a little closer to full prefill if sink= (or sink_from=) is given this prompt "
    "template's head, here and where chunks are precomputed (docs/results.md, One corpus, several "
    "prompts)."
)
Result = TypeVar("Result")


class Pipeline(FullPrefill):
    """Runs prompts over the chunks of one model, each in its turn.

    Parameters
    ----------
    corpus
        The model's chunks.
    auxiliary
        Returns the auxiliary model of a configuration.
    history
        Rows of earlier prompts; None keeps nothing.
    versions
        The chunks' contextual versions; None for entries alone.
    """

    def __init__(
        self,
        corpus: Corpus,
        auxiliary: Callable[[ReuseConfig], Auxiliary],
        requests: RequestQueue,
        history: History | None = None,
        versions: Versions | None = None,
    ) -> None:
        super().__init__(corpus.loaded, requests)
        self._corpus = corpus
        self._history = history or History(corpus.loaded, None, lambda: corpus.sinks.fingerprint)
        self._versions = versions
        self._model = corpus.loaded
        self._auxiliary = auxiliary
        self._preloads = threading.Semaphore(_MOST_PRELOADED)
        self._warned = False

    # ---- the story

    def run(
        self,
        request: Request,
        recompute: Callable[[Plan, Turn], Result],
        cancelled: Callable[[], bool] | None = None,
    ) -> Result:
        """Plan the prompt, and return what ``recompute``, the last step, makes of the plan.

        Entries are verified layer by layer while the prompt is computed. When one turns out
        to be corrupt, it counts as a miss and the prompt is run again without it. Where memory
        runs out before the first token, the prompt is run again without the device's tier, and
        a last time when the other answers have ended.
        """
        corrupt: dict[str, str] = {}
        located = self._find_and_load(request, corrupt)
        with ExitStack() as reading, ExitStack() as waiting:
            ahead = self._read_ahead(located, reading)
            if self._preloads.acquire(blocking=False):
                waiting.callback(self._preloads.release)
                ahead.start()
            with self._turn(request, located, cancelled) as turn:
                waiting.close()
                if self._has_more(request, located):
                    reading.close()
                    located = self._load(request, located, corrupt)
                    ahead = self._read_ahead(located, reading)
                made_room = False
                while True:
                    try:
                        ahead.start()
                        return recompute(self._plan(request, located), turn)
                    except CorruptEntryError as error:
                        reading.close()
                        corrupt |= {**dict(located.missed), error.text: error.reason}
                        located = self._find_and_load(request, corrupt)
                        ahead = self._read_ahead(located, reading)
                    except (MemoryError, RuntimeError) as error:
                        if turn.is_computed or not is_out_of_memory(error):
                            raise
                        if made_room and not self.requests.has_others(turn):
                            raise
                        release_calls(error)
                        if made_room:
                            self.requests.wait_for_others(cancelled)
                        made_room = True
                        self._make_room()

    def _has_more(self, request: Request, located: Located) -> bool:
        """Whether prompts have computed rows for this one while it waited for its turn."""
        sink, waited = located.sink, request.clock.steps.get("wait", 0.0)
        if sink is None or waited < _WAITED_S:
            return False
        found = found_rows(request, located, self._history)
        before = 0 if located.former is None else len(located.former.positions)
        return found is not None and len(found.positions) > before

    def _plan(self, request: Request, located: Located) -> Plan:
        spliced = self._splice(request, located)
        return self._select(request, spliced)

    # ---- its steps

    def _find_and_load(self, request: Request, corrupt: Mapping[str, str]) -> Located:
        """Find what can be reused: a former prompt's rows, and behind them known chunks.

        Chunks of which former prompts computed every token need no entry. Their rows are in
        memory, so only entries are compared with computing, by the speeds measured here.

        Parameters
        ----------
        corrupt
            Texts whose entries cannot be used, with the reasons.
        """
        with request.clock.step("find"):
            prompt = self._tokenize(request)
            if request.method.reuse == "none":
                return prompt
            located = replace(prompt, known=tuple(self._corpus.find(prompt.text)))
        return self._load(request, located, corrupt)

    def _load(self, request: Request, located: Located, corrupt: Mapping[str, str]) -> Located:
        """Take former prompts' rows, and open the entries of the chunks that were found."""
        tokens, spans = located.tokens, located.known or ()
        with request.clock.step("load"):
            sink = self._corpus.sinks.configured(request.config)
            located = replace(located, sink=sink)
            located = replace(located, former=found_rows(request, located, self._history))
            if self._versions is not None and restore_versions(
                request, located, self._history, self._versions
            ):
                located = replace(located, former=found_rows(request, located, self._history))
            known = {span for span in spans if located.has_rows(span)}
            slower = set[str]()
            for span in spans:
                own = tokens.touching(span.start, span.end)
                size = own.stop - own.start
                if span not in known and self._corpus.is_slower(span.text, size, sink):
                    slower.add(span.text)
            wanted = dict.fromkeys(
                span.text
                for span in spans
                if span not in known and span.text not in corrupt and span.text not in slower
            )
            opened = dict(zip(wanted, self._corpus.open(list(wanted), sink), strict=True))
            entries: list[LocatedEntry] = []
            missed: list[tuple[str, str]] = []
            for span in spans:
                found = opened.get(span.text) or Found(None, corrupt.get(span.text, "slower"))
                if span in known:
                    entries.append((located.known_chunk(span), span.start, span.end))
                elif found.entry is not None:
                    entries.append((found.entry, span.start, span.end))
                else:
                    missed.append((span.text, found.reason))
        located = replace(
            located,
            entries=tuple(entries),
            missed=tuple(missed),
            # an expired chunk is renewed by precompute() alone
            to_encode=tuple(t for t, reason in missed if reason not in ("slower", "expired")),
            to_load=tuple(t for t, reason in missed if reason == "slower"),
        )
        if self._history.is_beyond(len(tokens)):
            unused = tuple((entry.text, "positions") for entry, _, _ in entries)
            located = replace(located, entries=(), missed=(*located.missed, *unused))
        if self._versions is not None:
            located = with_versions(request, located, self._history, self._versions)
        return located

    def _read_ahead(self, located: Located, reading: ExitStack) -> ReadAhead:
        """Return the thread that reads the lazy entries; it ends with ``reading``."""
        lazy = [entry for entry, _, _ in located.entries if isinstance(entry, LazyKV)]
        ahead = ReadAhead(lazy, decoded=self._model.device.type == "cpu")
        reading.callback(ahead.stop)
        return ahead

    def _splice(self, request: Request, located: Located) -> Spliced:
        """Lay out the prompt and place the entries' rows in its cache."""
        sink, tokens, former = located.sink, located.tokens, located.former
        if sink is None or not (located.entries or former):
            return Spliced.nothing(located)
        with request.clock.step("splice"):
            head = _NO_IDS if self._history.is_beyond(len(tokens)) else sink.ids
            layout = lay_out(tokens, head, located.entries, former)
            missed = _unaligned(layout, located)
            if request.method.reuse == "prefix":
                layout = exact_prefix(layout)
            if not layout.exact and not layout.placed and former is None:
                return Spliced(located, layout, missed=missed)
            cache = splice(
                layout,
                sink.rows,
                self._model,
                spare_rows(request.answer_tokens),
                step=partial(request.clock.step, "splice"),
            )
            return Spliced(located, layout, cache, missed, self._head_warnings(layout, head))

    def _select(self, request: Request, spliced: Spliced) -> Plan:
        """Choose the tokens to recompute."""
        if spliced.cache is None:
            return Plan(spliced)
        config, method, layout = request.config, request.method, spliced.layout
        with request.clock.step("select"):
            scene = Scene(
                layout=layout,
                text=spliced.located.text,
                loaded=self._model,
                cache=spliced.cache,
                auxiliary=partial(self._auxiliary, config),
            )
            choice = choose(method, scene, config)
            rows = np.union1d(layout.fresh, choice.positions)
            if request.remote is not None:
                rows = rows[rows < layout.known_end]
            shift = spliced.cache.shift
            repair = Repair.of(method, layout, choice, rows, self._model, shift=shift)
        return Plan(spliced, choice, repair, rows)

    # ---- the last step: recompute, and go on or not

    def _prefill(self, request: Request, plan: Plan) -> tuple[Plan, torch.Tensor, Cache]:
        if plan.cache is None:
            began = time.perf_counter()
            done = super()._prefill(request, plan)
            self._corpus.record_speed(len(plan.ids), time.perf_counter() - began)
            return done
        return plan, self._recompute(request, plan), plan.cache

    def _hand_over(self, request: Request, plan: Plan, remote: RemoteAnswer) -> None:
        layout, cache = plan.spliced.layout, plan.cache
        end = layout.known_end
        # what is mostly unknown is computed where it is decoded
        if cache is None or 2 * int((layout.fresh < end).sum()) > end:
            return

        def compute() -> Rows:
            if len(plan.rows):
                self._recompute(request, plan)
            return cache.keys, cache.values

        with request.clock.step("hand_over"):
            if remote.hand_over(plan.ids[:end], compute):
                self._leave(request, plan, cache)

    def _begun(
        self, request: Request, plan: Plan, loaded: ReusableModel
    ) -> tuple[SplicedCache, Callable[[], torch.Tensor]]:
        if plan.cache is None:
            return super()._begun(request, plan, loaded)
        return plan.cache, partial(self._recompute, request, plan)

    def _recompute(self, request: Request, plan: Plan) -> torch.Tensor:
        """Recompute the plan's rows; return the logits after the prompt, ``[vocab]`` float32."""
        with request.clock.step("recompute"):
            logits = subset_forward(self._model, plan.subset)[0]
            self.loaded.wait()
        self._corpus.record_speed(len(plan.rows), request.clock.steps["recompute"])
        return logits

    def _keep(self, request: Request, plan: Plan, cache: SplicedCache, drawn: Drawn) -> None:
        """Keep the prompt's and the answer's rows for prompts that begin with them."""
        self._leave(request, plan, cache, drawn)

    # ---- details

    def _leave(
        self, request: Request, plan: Plan, cache: SplicedCache, drawn: Drawn | None = None
    ) -> None:
        """Keep the rows of a prompt, and of its answer, for later prompts."""
        left = left_rows(
            request, plan, cache, self._history, drawn, lossless=self._corpus.is_lossless
        )
        if left is not None:
            if plan.located.former is not None:
                self._history.count_hit()
            self._history.keep(left, request.clock.started)

    def _make_room(self) -> None:
        """Free what the device keeps for later requests, its tier of chunks too."""
        self._corpus.store.make_room()
        release_unused(self.loaded)

    def _head_warnings(self, layout: Layout, sink_ids: IntArray) -> tuple[str, ...]:
        """Return a warning where the prompt's head is not its chunks' sink; log it once."""
        encoded = any(not isinstance(piece.entry, KnownChunk) for piece in layout.placed)
        if layout.sink == len(sink_ids) or not encoded:
            return ()
        at = slice(layout.sink, layout.sink + _SHOWN_TOKENS)
        shown = {"sink": sink_ids[at], "prompt": layout.ids[at]}
        message = _HEAD_DIFFERS.format(
            matched=layout.sink,
            wanted=len(sink_ids),
            **{name: self.loaded.tokenizer.decode(ids) for name, ids in shown.items()},
        )
        if not self._warned:
            self._warned = True
            _log.warning(message)
        return (message,)


def _unaligned(layout: Layout, located: Located) -> tuple[tuple[str, str], ...]:
    """Count the entries of which no token is the prompt's; encoding them again does not help."""
    used: set[int] = {id(piece.entry) for piece in layout.placed}
    in_sink = located.tokens.characters(layout.sink)

    def is_unused(entry: LayeredKV, end: int) -> bool:
        return id(entry) not in used and end > in_sink

    return tuple(
        (entry.text, "unaligned") for entry, _, end in located.entries if is_unused(entry, end)
    )
