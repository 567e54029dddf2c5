"""One prompt's way: locate, wait for a turn, plan, compute, draw."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ragkv.attend.blocks import blocks_for
from ragkv.config import DecodeConfig, ReuseConfig
from ragkv.decode.batch import batch_of
from ragkv.decode.generate import Drawn, draw
from ragkv.decode.listener import Listener
from ragkv.decode.prefill import full_prefill, prefill_into
from ragkv.decode.steps import Steps
from ragkv.engine.plan import Clock, Computed, Located, Plan, RemoteAnswer, Request, StepDecoder
from ragkv.engine.planner import Planner
from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.history.node import Rows
from ragkv.model.loaded import LoadedModel
from ragkv.model.memory import is_out_of_memory, lack_of_memory, release_calls
from ragkv.prompt.chat import TokenIds
from ragkv.prompt.render import render
from ragkv.prompt.token_bytes import read_ids
from ragkv.prompt.tokens import IntArray, tokenize
from ragkv.schedule.requests import RequestQueue, Turn
from ragkv.select import Method
from ragkv.splice.buffer import SplicedCache, spare_rows
from ragkv.store.entry.lazy import CorruptEntryError, read_ahead


@dataclass(frozen=True, slots=True, eq=False)
class _Admitted:
    """A located prompt whose turn it is."""

    located: Located
    turn: Turn


class Pipeline:
    """Runs prompts, each in its turn.

    Parameters
    ----------
    planner
        None for a model whose caches cannot be reused: every prompt is prefilled in full.
    decoder
        Computes the answers' steps; None computes them here.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        requests: RequestQueue,
        planner: Planner | None = None,
        decoder: StepDecoder | None = None,
    ) -> None:
        self._loaded = loaded
        self._requests = requests
        self._planner = planner
        self._decoder = decoder

    def prefill(self, request: Request) -> Computed:
        """Compute the prompt, and return it with its cache and the next token's logits."""
        with self._admitted(request, None) as admitted:
            computed = self._compute(request, admitted, None)
            self._finish(request, computed.plan)
            return computed

    def generate(
        self,
        request: Request,
        decode: DecodeConfig,
        *,
        listener: Listener,
        cancelled: Callable[[], bool] | None = None,
    ) -> tuple[Plan, Drawn]:
        """Compute the prompt and generate; the arguments are those of :func:`draw`.

        Raises
        ------
        Cancelled
            ``cancelled`` returned True before the request's turn.
        """
        with self._admitted(request, cancelled) as admitted:
            return self._answer(request, decode, admitted, listener, cancelled)

    def warm_up(self, config: ReuseConfig, method: Method) -> None:
        """Answer a prompt of 32 words, a long pass for quantised weights, with two steps."""
        request = Request("The " * 32, config.override(history=False), method, Clock(), 2)
        self.generate(request, DecodeConfig(2, ignore_eos=True), listener=Listener())

    # ---- locate, and wait for the model

    @contextmanager
    def _admitted(
        self, request: Request, cancelled: Callable[[], bool] | None
    ) -> Iterator[_Admitted]:
        """Locate the prompt's chunks and wait for its turn, which ends with the block."""
        located = self._locate(request)
        with self._turn(request, located, cancelled) as turn:
            yield _Admitted(located, turn)

    def _locate(self, request: Request) -> Located:
        """Tokenise the prompt, find its chunks, and open their entries."""
        planner = self._planner
        with request.clock.step("find"):
            located = self._tokenize(request)
            if planner is not None:
                located = planner.find(request, located)
        return located if planner is None else planner.load(request, located, {})

    def _tokenize(self, request: Request) -> Located:
        prompt, tokenizer = request.prompt, self._loaded.tokenizer
        if isinstance(prompt, TokenIds):
            self._check(np.asarray(prompt.ids, dtype=np.int32))
            rendered, tokens = read_ids(prompt.ids, tokenizer)
            return Located(rendered, tokens)
        rendered = render(prompt, tokenizer)
        tokens = tokenize(rendered, tokenizer)
        self._check(tokens.ids)
        return Located(rendered, tokens)

    def _check(self, ids: IntArray) -> None:
        if not len(ids):
            raise ConfigError("the prompt is empty")
        limit = self._loaded.positions
        if limit is not None and len(ids) > limit:
            raise PromptTooLongError(
                f"a prompt of {len(ids)} tokens exceeds the model's {limit} positions: "
                "retrieve fewer or shorter chunks"
            )
        self._loaded.require_embedded(ids, "the prompt")

    @contextmanager
    def _turn(
        self, request: Request, located: Located, cancelled: Callable[[], bool] | None
    ) -> Iterator[Turn]:
        """Wait for the request's turn; other answers' steps run between its layers.

        Raises
        ------
        OutOfMemoryError
            Memory ran out in the block.
        """
        loaded, planner = self._loaded, self._planner
        with ExitStack() as stack:
            with request.clock.step("wait"):
                turn = stack.enter_context(
                    self._requests.turn(
                        loaded,
                        cached_share=located.cached_share,
                        tokens=len(located.tokens) + spare_rows(request.answer_tokens),
                        cancelled=cancelled,
                    )
                )
            stack.enter_context(loaded.without_autocast())
            if planner is not None:
                turn.until_prefilled(batch_of(planner.loaded).between_layers(planner.loaded))
            try:
                yield turn
            except (MemoryError, RuntimeError) as error:
                if planner is None or not is_out_of_memory(error):
                    raise
                calls = release_calls(error)  # before what is free is counted
                others = self._requests.running - 1
                lack = lack_of_memory(planner.loaded, turn.tokens, others=others)
                lack.add_note(calls)
                raise lack from None

    # ---- compute the prompt

    def _compute(
        self, request: Request, admitted: _Admitted, cancelled: Callable[[], bool] | None
    ) -> Computed:
        """Plan and compute the prompt.

        Entries are verified layer by layer while the prompt is computed. A corrupt one counts as a
        miss, and the prompt is planned again without it. If memory runs out, the prompt is computed
        again without the store's tier on the device, and a last time after the other answers.
        """
        located, planner = admitted.located, self._planner
        if planner is None:
            return self._computed(request, Plan.full(located))
        if planner.has_more(request, located):
            located = planner.load(request, located, {})
        corrupt: dict[str, str] = {}
        made_room = False
        while True:
            try:
                with read_ahead(located.lazy, decoded=self._loaded.device.type == "cpu"):
                    return self._computed(request, planner.plan(request, located))
            except CorruptEntryError as error:
                corrupt |= {**dict(located.missed), error.text: error.reason}
                with request.clock.step("find"):
                    located = planner.find(request, located)
                located = planner.load(request, located, corrupt)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if made_room and not self._requests.has_others(admitted.turn):
                    raise
                release_calls(error)
                if made_room:
                    self._requests.wait_for_others(cancelled)
                made_room = True
                planner.make_room()

    def _computed(self, request: Request, plan: Plan) -> Computed:
        """Compute the rows that the plan does not have."""
        if request.remote is not None:
            self._hand_over(request, plan, request.remote)
            return Computed(plan)
        if self._planner is not None and plan.cache is not None:
            return Computed(plan, plan.cache, self._planner.recompute(request, plan))
        if request.answer_tokens:
            return self._prefilled(request, plan)
        began = time.perf_counter()
        logits, cache = full_prefill(self._loaded, plan.ids)
        self._loaded.wait()
        if self._planner is not None:
            self._planner.corpus.record_speed(len(plan.ids), time.perf_counter() - began)
        return Computed(plan, cache, logits)

    def _finish(self, request: Request, plan: Plan) -> None:
        """Wait for the rows that were recomputed, if any."""
        if self._planner is not None and plan.cache is not None:
            self._planner.finish(request, plan)

    def _prefilled(self, request: Request, plan: Plan) -> Computed:
        """Compute the whole prompt; transformers' own loop does so for a model without reuse."""
        if self._planner is None:
            return Computed(plan)
        loaded = self._planner.loaded
        rows = len(plan.ids) + spare_rows(request.answer_tokens)
        cache = SplicedCache(loaded, 0, spare=rows)
        return Computed(plan, cache, prefill_into(loaded, plan.ids, cache))

    def _hand_over(self, request: Request, plan: Plan, remote: RemoteAnswer) -> None:
        """Transfer the prompt's rows to the remote decoder, unless most would be computed here."""
        layout, cache, planner = plan.layout, plan.cache, self._planner
        end = layout.known_end
        if planner is None or cache is None or 2 * int((layout.fresh < end).sum()) > end:
            return

        def compute() -> Rows:
            if len(plan.rows):
                planner.recompute(request, plan)
                planner.finish(request, plan)
            return cache.keys, cache.values

        with request.clock.step("hand_over"):
            if remote.hand_over(plan.ids[:end], compute):
                planner.keep(request, plan, cache)

    # ---- draw the answer

    def _answer(
        self,
        request: Request,
        decode: DecodeConfig,
        admitted: _Admitted,
        listener: Listener,
        cancelled: Callable[[], bool] | None,
    ) -> tuple[Plan, Drawn]:
        """Compute the prompt and draw its answer."""
        computed, turn = self._compute(request, admitted, cancelled), admitted.turn
        plan, ends = computed.plan, cancelled or _never
        listener.progress.chunks = tuple(span.text for span in plan.located.known or ())
        if request.remote is not None:
            turn.prefilled()
            return plan, request.remote.draw(plan.ids, listener, ends)
        steps = self._steps(request, computed, decode, turn)
        drawn = draw(self._loaded, plan.ids, steps, decode, listener=listener, cancelled=ends)
        if self._planner is not None and isinstance(computed.cache, SplicedCache):
            here = drawn if self._decoder is None else replace(drawn, token_ids=[])
            self._planner.keep(request, plan, computed.cache, here)
        return plan, drawn

    def _steps(
        self, request: Request, computed: Computed, decode: DecodeConfig, turn: Turn
    ) -> Steps | None:
        """Return the answer's steps; None for transformers' own loop."""
        planner, cache, logits = self._planner, computed.cache, computed.logits
        if planner is None or logits is None or not isinstance(cache, SplicedCache):
            return None
        loaded, plan = planner.loaded, computed.plan
        if self._decoder is not None:
            self._finish(request, plan)
            room, prefilled = decode.max_new_tokens, turn.prefilled
            return self._decoder.steps(plan.ids, cache, logits, room=room, prefilled=prefilled)
        return Steps(
            loaded,
            plan.ids,
            cache,
            logits,
            plan.repair.copies,
            sparse=blocks_for(loaded, decode.sparse, len(plan.ids)),
            begin=partial(self._finish, request, plan),
            prefilled=turn.prefilled,
        )


def _never() -> bool:
    return False
