"""Prompts without reuse: the model's own prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from transformers.cache_utils import Cache

from ragkv.attend.blocks import blocks_for
from ragkv.config import DecodeConfig, ReuseConfig
from ragkv.decode.batch import batch_of
from ragkv.decode.generate import Drawn, draw
from ragkv.decode.listener import Listener
from ragkv.decode.prefill import full_prefill, prefill_into
from ragkv.decode.steps import Steps
from ragkv.engine.plan import Located, Plan, Spliced
from ragkv.engine.remote import RemoteAnswer
from ragkv.engine.request import Request
from ragkv.engine.requests import RequestQueue, Turn
from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.model.loaded import LoadedModel, ReusableModel, require_reusable
from ragkv.model.memory import is_out_of_memory, lack_of_memory, release_calls
from ragkv.prompt.chat import TokenIds
from ragkv.prompt.render import render
from ragkv.prompt.token_bytes import read_ids
from ragkv.prompt.tokens import IntArray, tokenize
from ragkv.report.clock import Clock
from ragkv.select import Method
from ragkv.splice.buffer import SplicedCache, spare_rows

Result = TypeVar("Result")


class FullPrefill:
    """Runs prompts by full prefill, each in its turn."""

    def __init__(self, loaded: LoadedModel, requests: RequestQueue) -> None:
        self.loaded = loaded
        self.requests = requests

    def run(
        self,
        request: Request,
        recompute: Callable[[Plan, Turn], Result],
        cancelled: Callable[[], bool] | None = None,
    ) -> Result:
        """Plan the prompt and return the last step's result."""
        with request.clock.step("find"):
            located = self._tokenize(request)
        with self._turn(request, located, cancelled) as turn:
            return recompute(Plan(Spliced.nothing(located)), turn)

    def prefill(self, request: Request) -> tuple[Plan, torch.Tensor, Cache]:
        """Compute the prompt.

        Returns
        -------
        tuple
            The plan, the next token's logits ``[vocab]`` float32, and the whole prompt's cache.
        """
        return self.run(request, lambda plan, _: self._prefill(request, plan))

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
        ends = cancelled or _never

        def finish(plan: Plan, turn: Turn) -> tuple[Plan, Drawn]:
            known = plan.spliced.located.known or ()
            listener.progress.chunks = tuple(span.text for span in known)
            return self._generate(request, decode, plan, turn, listener=listener, cancelled=ends)

        return self.run(request, finish, cancelled)

    def warm_up(self, config: ReuseConfig, method: Method) -> None:
        """Answer a prompt of one word with two steps."""
        request = Request("The", config.override(history=False), method, Clock(), 2)
        self.generate(request, DecodeConfig(2, ignore_eos=True), listener=Listener())

    @contextmanager
    def _turn(
        self, request: Request, located: Located, cancelled: Callable[[], bool] | None
    ) -> Iterator[Turn]:
        """Wait until this request may use the model; others' steps run between its layers.

        Raises
        ------
        OutOfMemoryError
            Memory ran out in the block.
        """
        loaded, tokens = self.loaded, len(located.tokens)
        waiting = request.clock.step("wait")
        with ExitStack() as stack:
            with waiting:
                turn = stack.enter_context(
                    self.requests.turn(
                        loaded,
                        cached_share=located.cached_share,
                        tokens=tokens + spare_rows(request.answer_tokens),
                        cancelled=cancelled,
                    )
                )
            stack.enter_context(loaded.without_autocast())
            if isinstance(loaded, ReusableModel):
                turn.until_prefilled(batch_of(loaded).between_layers(loaded))
            try:
                yield turn
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or not isinstance(loaded, ReusableModel):
                    raise
                calls = release_calls(error)  # before what is free is counted
                lack = lack_of_memory(loaded, turn.tokens, others=self.requests.running - 1)
                lack.add_note(calls)
                raise lack from None

    def _tokenize(self, request: Request) -> Located:
        prompt, tokenizer = request.prompt, self.loaded.tokenizer
        if isinstance(prompt, TokenIds):
            self._check(np.asarray(prompt.ids, dtype=np.int32))
            return Located(*read_ids(prompt.ids, tokenizer))
        rendered = render(prompt, tokenizer)
        tokens = tokenize(rendered, tokenizer)
        self._check(tokens.ids)
        return Located(rendered, tokens)

    def _check(self, ids: IntArray) -> None:
        if not len(ids):
            raise ConfigError("the prompt is empty")
        limit = self.loaded.positions
        if limit is not None and len(ids) > limit:
            raise PromptTooLongError(
                f"a prompt of {len(ids)} tokens exceeds the model's {limit} positions: "
                "retrieve fewer or shorter chunks"
            )
        self.loaded.require_embedded(ids, "the prompt")

    def _prefill(self, request: Request, plan: Plan) -> tuple[Plan, torch.Tensor, Cache]:
        del request
        logits, cache = full_prefill(self.loaded, plan.ids)
        self.loaded.wait()
        return plan, logits, cache

    def _generate(
        self,
        request: Request,
        decode: DecodeConfig,
        plan: Plan,
        turn: Turn,
        *,
        listener: Listener,
        cancelled: Callable[[], bool],
    ) -> tuple[Plan, Drawn]:
        if request.remote is not None:
            self._hand_over(request, plan, request.remote)
            turn.is_computed = True
            turn.prefilled()
            return plan, request.remote.draw(plan.ids, listener, cancelled)
        steps, loaded = None, self.loaded
        if isinstance(loaded, ReusableModel):
            cache, first = self._begun(request, plan, loaded)

            def compute() -> torch.Tensor:
                logits = first()
                turn.is_computed = True
                return logits

            steps = self._steps(plan, cache, compute, turn, decode)
        drawn = draw(loaded, plan.ids, steps, decode, listener=listener, cancelled=cancelled)
        if steps is not None:
            self._keep(request, plan, cache, drawn)
        return plan, drawn

    def _hand_over(self, request: Request, plan: Plan, remote: RemoteAnswer) -> None:
        """Give another process what is known of the prompt; here nothing is."""

    def _begun(
        self, request: Request, plan: Plan, loaded: ReusableModel
    ) -> tuple[SplicedCache, Callable[[], torch.Tensor]]:
        """Return the prompt's cache, and what computes the rest of it and its logits."""
        rows = len(plan.ids) + spare_rows(request.answer_tokens)
        cache = SplicedCache(loaded, 0, spare=rows)
        return cache, partial(prefill_into, loaded, plan.ids, cache)

    def _steps(
        self,
        plan: Plan,
        cache: SplicedCache,
        first: Callable[[], torch.Tensor],
        turn: Turn,
        decode: DecodeConfig,
    ) -> Steps:
        loaded, copies = require_reusable(self.loaded), plan.repair.copies
        sparse = blocks_for(loaded, decode.sparse, len(plan.ids))
        return Steps(
            loaded, plan.ids, cache, first, copies, sparse=sparse, prefilled=turn.prefilled
        )

    def _keep(self, request: Request, plan: Plan, cache: SplicedCache, drawn: Drawn) -> None:
        """Take the cache of a finished answer; nothing is done with it here."""


def _never() -> bool:
    return False
