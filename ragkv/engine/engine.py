"""RagKV, the engine: precompute chunks, answer prompts from their caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragkv.answer.completion import Completion, TokenLogprobs
from ragkv.config import BatchConfig, DecodeConfig, ReuseConfig, StoreConfig
from ragkv.decode.generate import Drawn
from ragkv.decode.listener import Listener
from ragkv.decode.stopping import stops_of
from ragkv.engine.answer_text import AnswerText, with_calls
from ragkv.engine.full import FullPrefill
from ragkv.engine.lifecycle import Lifecycle
from ragkv.engine.plan import Plan, report_of
from ragkv.engine.request import (
    Request,
    check_calibration,
    check_document,
    check_texts,
)
from ragkv.engine.requests import RequestQueue
from ragkv.engine.reuse import Reuse
from ragkv.engine.settings import check_settings
from ragkv.engine.speculations import Speculates, Speculations
from ragkv.engine.state import EngineState
from ragkv.engine.stream import CompletionStream, OnText, Prefilled
from ragkv.engine.unused import unsupported
from ragkv.engine.verify import verified
from ragkv.errors import ClosedError, ConfigError
from ragkv.model.flops import prefill_flops_of
from ragkv.model.load import load_model, pretrained
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.model.lock import lock_of
from ragkv.prompt.chat import prompt_of
from ragkv.prompt.messages import Message
from ragkv.prompt.render import Prompt, render, template_head
from ragkv.report.account import PrecomputeReport, ReuseReport
from ragkv.report.clock import Clock
from ragkv.retrieve.named import NamedChunks
from ragkv.select import Method, method_of
from ragkv.store import open_store


class RagKV(Speculates, EngineState):
    """A language model that answers from precomputed chunk caches.

    Parameters
    ----------
    model
        A hub name or folder, a loaded transformers model (then with its tokenizer),
        or None: the embedded default, SmolLM2-135M-Instruct.
    store
        A folder or a StoreConfig; None is the user's cache folder, ``":memory:"``
        memory alone.
    reuse
        How chunks are reused; any call can override its fields.
    namespace
        Entries of another namespace are never seen.
    device, dtype
        Where and as what the model runs; None leaves it as it is.
    on_unsupported
        ``"full"`` serves a model whose caches cannot be moved exactly by full prefill.
    batch
        How many callers are served at once, and how. Engines over one model share it: None
        leaves it as it is.

    Raises
    ------
    ModelNotFoundError, UnsupportedModelError, StoreError, ConfigError
    """

    pretrained = staticmethod(pretrained)
    check_settings = staticmethod(check_settings)

    def __init__(
        self,
        model: str | Path | PreTrainedModel | LoadedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        store: str | Path | StoreConfig | None = None,
        reuse: ReuseConfig = ReuseConfig(),
        namespace: str = "default",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        on_unsupported: Literal["raise", "full"] = "raise",
        batch: BatchConfig | None = None,
    ) -> None:
        settings = check_settings(reuse, store=store, namespace=namespace, batch=batch)
        self.reuse = reuse
        self.namespace = namespace
        loaded = load_model(
            model, tokenizer, device=device, dtype=dtype, on_unsupported=on_unsupported
        )
        if not isinstance(model, LoadedModel):
            loaded = verified(loaded, on_unsupported)
        self._loaded = loaded
        self._lock = lock_of(loaded.model)
        costs = prefill_flops_of(loaded) if isinstance(loaded, ReusableModel) else None
        self._store = open_store(settings, namespace, device=loaded.device, costs=costs)
        self._reuse: Reuse | None = None
        self._requests = self._lock.shared(RequestQueue)
        self._requests.configure(batch)
        self._pipeline = FullPrefill(loaded, self._requests)
        if isinstance(loaded, ReusableModel):
            self._reuse = Reuse.over(loaded, self._store, settings)
            self._pipeline = self._reuse.pipeline(self._requests)
        try:
            self._configured({"calibrated_for": reuse.calibrated_for})
        except ConfigError:
            self._store.close()
            raise
        self._lifecycle = Lifecycle()
        self._named = NamedChunks()
        self._speculations = Speculations(self._pipeline, self._lifecycle, self._reuse)
        self._lock.join()

    # ---- ingestion

    def precompute(
        self,
        texts: Iterable[str],
        *,
        document: str | None = None,
        revision: str | None = None,
        expires_in: float | None = None,
        show_progress: bool | None = False,
        **overrides: Any,
    ) -> PrecomputeReport:
        """Encode the chunks that are not stored yet.

        Parameters
        ----------
        document
            The name of a document whose chunks are exactly these texts. Its former chunks are
            deleted, unless they are another document's, too.
        revision
            The document's state, such as its hash: the texts are a part of it, and others stay.
        expires_in
            Seconds until the chunks expire, the last of several; None is never, for new ones.
        show_progress
            Say the size on standard error, and show a bar; None: the bar in a terminal alone.

        Raises
        ------
        StoreFullError
            The disk or quota is full, or will be; stored chunks remain.
        """
        setting, chunks = self._configured(overrides), check_texts(texts)
        if self._reuse is None:
            return PrecomputeReport()
        with self._lifecycle:
            return self._reuse.precompute(
                *(chunks, setting, document, revision, expires_in),
                show_progress=show_progress,
            )

    def contains(self, text: str, **overrides: Any) -> bool:
        """Whether the chunk can be reused: stored for this model behind this sink."""
        config, _ = self._configured(overrides)
        with self._lifecycle:
            corpus = None if self._reuse is None else self._reuse.corpus
            return corpus is not None and corpus.contains(text, corpus.sink_for(config))

    def forget(self, text: str) -> bool:
        """Delete a chunk, and the KV of former prompts; return whether it was stored."""
        with self._lifecycle:
            if self._reuse is None:
                return self._store.delete(check_texts([text])[0].strip()) > 0
            return self._reuse.forget(text)

    def forget_document(self, document: str) -> int:
        """Delete the chunks that belong to this document alone; return how many."""
        owner = self._store if self._reuse is None else self._reuse
        with self._lifecycle:
            return owner.forget_document(check_document(document))

    def prefetch(
        self, texts: Sequence[str], *, for_next_answer: bool = True, **overrides: Any
    ) -> None:
        """Name the chunks that were retrieved; start loading them in the background.

        Those that are not stored are encoded after the next answer whose prompt contains them,
        unless ``on_miss`` is ``"skip"``. The next answer's report says of each why it was not
        reused; not so without ``for_next_answer``, for a call that names them (``retrieved``).
        """
        with self._lifecycle:
            named = [text.strip() for text in check_texts(texts)]
            if for_next_answer:
                self._named.add(named)
            if self._reuse is not None:
                self._reuse.load(named, self._configured(overrides)[0])

    def wait(self) -> None:
        """Return when all background loading and encoding is done.

        Raises
        ------
        ModelInUseError
            The calling thread itself holds the model, which that work may wait for.
        """
        self._lock.refuse_reentry()
        with suppress(ClosedError), self._lifecycle:
            if self._reuse is not None:
                self._reuse.background.wait()

    # ---- answering

    def prefill(
        self,
        prompt: Prompt,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Prefilled:
        """Repair the prompt's cache and return the next token's logits."""
        clock = Clock()
        asked, named = prompt_of(prompt, chat_template_kwargs), tuple(self._named.take())
        request = Request(asked, *self._configured(overrides), clock, named=named)
        with self._lifecycle:
            plan, logits, cache = self._pipeline.prefill(request)
            report = self._report(request, plan, time.perf_counter())
            self._follow_up(request, plan)
        return Prefilled(logits, plan.ids.tolist(), cache, report, plan.repair.copies)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        top_k: int = 0,
        stop_token_ids: Sequence[int] = (),
        prompt_lookup_num_tokens: int | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        json_schema: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        retrieved: Sequence[str] = (),
        **overrides: Any,
    ) -> Completion:
        """Answer a prompt: a string (completed verbatim) or a list of chat messages.

        The settings are those of :class:`ragkv.config.DecodeConfig`; ``chat_template_kwargs`` are
        variables of the chat template, ``overrides`` fields of ReuseConfig for this call. Each of
        the ``retrieved`` chunks is in the report. Threads may call at once, and draw together.
        """
        drawing = (max_new_tokens, temperature, top_p, stop, seed, top_k, stop_token_ids)
        further = (prompt_lookup_num_tokens, ignore_eos, logprobs, json_schema, generation)
        asked = prompt_of(prompt, chat_template_kwargs)
        decode = with_calls(DecodeConfig(*drawing, *further), asked, self.tokenizer)
        request = self._request(asked, overrides, decode, retrieved)
        with self._lifecycle:
            return self._complete(request, decode)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        top_k: int = 0,
        stop_token_ids: Sequence[int] = (),
        prompt_lookup_num_tokens: int | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        json_schema: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        retrieved: Sequence[str] = (),
        **overrides: Any,
    ) -> CompletionStream:
        """Answer like :meth:`generate`, piece by piece, in a thread of its own."""
        drawing = (max_new_tokens, temperature, top_p, stop, seed, top_k, stop_token_ids)
        further = (prompt_lookup_num_tokens, ignore_eos, logprobs, json_schema, generation)
        asked = prompt_of(prompt, chat_template_kwargs)
        decode = with_calls(DecodeConfig(*drawing, *further), asked, self.tokenizer)
        request = self._request(asked, overrides, decode, retrieved)
        return self._lifecycle.run_in_thread(
            partial(self._complete, request, decode),
            partial(CompletionStream, holds_model=partial(getattr, self._lock, "is_mine")),
        )

    def _complete(
        self,
        request: Request,
        decode: DecodeConfig,
        on_text: OnText = lambda _: None,
        cancelled: Callable[[], bool] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> Completion:
        answer = AnswerText(self.tokenizer, stops_of(self._loaded, decode), request.prompt)
        listener = Listener(
            lambda token: on_text(answer.feed(token)),
            logprobs=logprobs,
            top=decode.logprobs,
            ends=lambda: answer.is_complete,
        )
        given: dict[str, Any] = {"listener": listener, "cancelled": cancelled}
        plan, drawn = self._pipeline.generate(request, decode, **given)
        report = self._report(request, plan, drawn.first_token_at, drawn)
        on_text(answer.finish(cut_off=drawn.finish_reason != "stop"))
        self._follow_up(request, plan)
        calls = answer.tool_calls, answer.invalid_tool_calls
        about_it = (report, drawn.finish_reason, drawn.logprobs)
        by_text = tuple(each.in_openais_form(self._text_of) for each in drawn.logprobs)
        return Completion(answer.text, drawn.token_ids, *about_it, *calls, by_text)

    def _report(
        self, request: Request, plan: Plan, first_token_at: float, drawn: Drawn | None = None
    ) -> ReuseReport:
        account = unsupported if self._reuse is None else self._reuse.account
        told, dtype = account(request, plan, self._named), self._loaded.dtype
        return report_of(request, plan, first_token_at, dtype=dtype, drawn=drawn, account=told)

    def _follow_up(self, request: Request, plan: Plan) -> None:
        if self._reuse is not None:
            self._reuse.background.schedule_followups(request, plan)

    # ---- the model's lock

    def turn(self) -> AbstractContextManager[object]:
        """Hold the model's lock in the block: calls of your own are slower without, not wrong."""
        with self._lifecycle:
            return self._lock

    # ---- what is configured

    def render(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
        """Return the text of a prompt that the model reads."""
        return render(prompt_of(prompt, chat_template_kwargs), self.tokenizer).text

    def sink_from(
        self,
        template: str | Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a prompt template's text before its first field, with the tools' definitions."""
        return template_head(template, self.tokenizer, tools, chat_template_kwargs)

    def _configured(self, overrides: dict[str, Any]) -> tuple[ReuseConfig, Method]:
        config = self.reuse.override(**overrides) if overrides else self.reuse
        method = method_of(config)
        if "calibrated_for" in overrides and self._reuse is not None:
            check_calibration(config, self._loaded.name, self._reuse.corpus.fingerprint)
        return config, method

    def _request(
        self,
        prompt: Prompt,
        overrides: dict[str, Any],
        decode: DecodeConfig,
        retrieved: Sequence[str],
    ) -> Request:
        clock = Clock()
        config, method = self._configured(overrides)
        texts = tuple(text.strip() for text in check_texts(retrieved))
        named, most = tuple(self._named.take()), decode.max_new_tokens
        return Request(prompt, config, method, clock, most, retrieved=texts, named=named)

    def close(self) -> None:
        """Wait for the answers under way, finish background work and release the store.

        Calls after it raise ClosedError. In a forked process it does nothing. Raises
        ModelInUseError where the calling thread itself holds the model.
        """
        if self._lifecycle.forked:
            return
        self._lock.refuse_reentry()
        if self._lifecycle.close(self._speculations.clear):
            if self._reuse is not None:
                self._reuse.background.close()
            with self._lock:
                if self._lock.leave():
                    self._loaded.workspace.release()
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
