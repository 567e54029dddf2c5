"""Prompts without reuse: the model's own prefill."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from transformers.cache_utils import Cache

from ragkv.config import DecodeConfig
from ragkv.decode.full import full_prefill
from ragkv.decode.generate import Drawn, draw
from ragkv.decode.steps import Steps
from ragkv.engine.plan import Located, Plan, Spliced
from ragkv.engine.request import Request
from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.prompt.render import render
from ragkv.prompt.tokens import tokenize
from ragkv.splice.buffer import SplicedCache, spare_rows

Result = TypeVar("Result")


class FullPrefill:
    """Runs prompts by full prefill. The caller holds the model's lock."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def run(self, request: Request, recompute: Callable[[Plan], Result]) -> Result:
        """Plan the prompt and return the last step's result."""
        with request.clock.step("find"):
            located = self._tokenize(request)
        return recompute(Plan(Spliced.nothing(located)))

    def prefill(self, request: Request) -> tuple[Plan, torch.Tensor, Cache]:
        """Compute the prompt.

        Returns
        -------
        tuple
            The plan, the next token's logits ``[vocab]`` float32, and the whole prompt's cache.
        """
        return self.run(request, partial(self._prefill, request))

    def generate(
        self,
        request: Request,
        decode: DecodeConfig,
        *,
        on_token: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> tuple[Plan, Drawn]:
        """Compute the prompt and generate; the arguments are those of :func:`draw`."""
        return self.run(
            request,
            partial(self._generate, request, decode, on_token=on_token, cancelled=cancelled),
        )

    def _tokenize(self, request: Request) -> Located:
        rendered = render(request.prompt, self._loaded.tokenizer)
        tokens = tokenize(rendered, self._loaded.tokenizer)
        if not len(tokens):
            raise ConfigError("the prompt is empty")
        limit = self._loaded.positions
        if limit is not None and len(tokens) > limit:
            raise PromptTooLongError(
                f"a prompt of {len(tokens)} tokens exceeds the model's {limit} positions: "
                "retrieve fewer or shorter chunks"
            )
        return Located(rendered.text, tokens)

    def _prefill(self, request: Request, plan: Plan) -> tuple[Plan, torch.Tensor, Cache]:
        del request
        logits, cache = full_prefill(self._loaded, plan.ids)
        self._loaded.wait()
        return plan, logits, cache

    def _generate(
        self,
        request: Request,
        decode: DecodeConfig,
        plan: Plan,
        *,
        on_token: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> tuple[Plan, Drawn]:
        steps, loaded = None, self._loaded
        if isinstance(loaded, ReusableModel) and decode.cache_implementation is None:
            cache = SplicedCache(
                loaded.architecture,
                0,
                dtype=loaded.dtype,
                device=loaded.device,
                workspace=loaded.workspace,
                spare=len(plan.ids) + spare_rows(decode.max_new_tokens),
            )
            steps = Steps(loaded, plan.ids, cache, lambda: full_prefill(loaded, plan.ids, cache)[0])
        drawn = draw(loaded, plan.ids, steps, decode, on_token=on_token, cancelled=cancelled)
        if steps is not None:
            self._keep(request, plan, cache, drawn)
        return plan, drawn

    def _keep(self, request: Request, plan: Plan, cache: SplicedCache, drawn: Drawn) -> None:
        """Take the cache of a finished answer; nothing is done with it here."""
