"""RagKV, the engine: precompute chunks, answer prompts from their caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragkv.answer.completion import Completion
from ragkv.answer.engine import ModelInfo
from ragkv.answer.text import AnswerText, with_calls
from ragkv.attend.graphs import release_kept
from ragkv.config import DECODE_SETTINGS, DecodeConfig, ReuseConfig, StoreConfig
from ragkv.config.reuse import AnswerOptions, ReuseOptions
from ragkv.decode.generate import Drawn, stops_of
from ragkv.decode.listener import Listener, Progress
from ragkv.engine.account import report_of, unsupported_account
from ragkv.engine.pipeline import Pipeline
from ragkv.engine.plan import Clock, Plan, RemoteDecoder, Request
from ragkv.engine.quality import warn_if_garbled
from ragkv.engine.reuse import EngineStatus, Reuse, info_of, status_of
from ragkv.engine.settings import check_calibration, check_settings, local_decoder, tier_bytes
from ragkv.engine.stream import CompletionStream, OnText, Prefilled
from ragkv.engine.verify import verified
from ragkv.errors import ClosedError, ConfigError
from ragkv.ingest.documents import check_chunk, check_document, check_texts
from ragkv.model.linear import arithmetic_of
from ragkv.model.load import load_model
from ragkv.model.loaded import LoadedModel, ReusableModel, prefill_flops_of
from ragkv.model.lock import lock_of
from ragkv.model.memory import typed_memory_errors
from ragkv.prompt.chat import prompt_of
from ragkv.prompt.messages import Message
from ragkv.prompt.render import Prompt, render, template_head
from ragkv.report.account import PrecomputeReport, ReuseReport
from ragkv.retrieve.named import NamedChunks
from ragkv.schedule.lifecycle import Lifecycle
from ragkv.schedule.requests import RequestQueue
from ragkv.select import Method, method_of
from ragkv.store import open_store


class RagKV:
    """A language model that answers from precomputed chunk caches, many threads at once.

    Raises ModelNotFoundError, UnsupportedModelError, StoreError, ConfigError, OutOfMemoryError.

    Parameters
    ----------
    model, tokenizer
        A hub name, folder or GGUF file, a loaded transformers model (with its tokenizer), or None
        for the embedded default, SmolLM2-135M-Instruct.
    store
        A folder or a StoreConfig; None is the user's cache folder, ``":memory:"`` only memory.
    reuse
        Settings of reuse; any call can override its fields.
    namespace
        Entries of different namespaces are invisible to one another.
    device, dtype
        The model's device and dtype; None keeps them, and multiplies float32 weights of a quantised
        file (GGUF) in 4 bits or bfloat16 on a CPU.
    on_unsupported
        ``"full"`` serves a model whose caches cannot be moved exactly by full prefill.
    max_running, kv_bytes
        Largest number of simultaneous answers (default 16) and bytes of their keys and values
        (default: the free memory, on a CPU half of it). Further requests wait. Engines over one
        model share both limits.
    decoder
        Decodes answers elsewhere, such as ``vllm_ragkv.decoder.VllmDecoder``. ``"llama.cpp"``: on
        the CPU by the package ``ragkv-llamacpp``, from the model's GGUF file. None decodes here.
    """

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
        max_running: int | None = None,
        kv_bytes: int | None = None,
        decoder: RemoteDecoder | Literal["llama.cpp"] | None = None,
    ) -> None:
        settings = check_settings(
            reuse, store=store, namespace=namespace, max_running=max_running, kv_bytes=kv_bytes
        )
        self.reuse = reuse
        self.namespace = namespace
        self._decoder = None if isinstance(decoder, str) else decoder
        open_decoder = local_decoder(decoder)
        loaded = load_model(
            model, tokenizer, device=device, dtype=dtype, on_unsupported=on_unsupported
        )
        if not isinstance(model, LoadedModel):
            loaded = verified(loaded, on_unsupported)
            warn_if_garbled(loaded, reuse)
        self._loaded = loaded
        self._local_decoder = open_decoder(loaded)
        self._lock = lock_of(loaded.model)
        costs = prefill_flops_of(loaded) if isinstance(loaded, ReusableModel) else None
        self._store = open_store(settings, namespace, device=loaded.device, costs=costs)
        self._reuse: Reuse | None = None
        self._requests = self._lock.shared(RequestQueue)
        self._named = NamedChunks()
        if isinstance(loaded, ReusableModel):
            self._reuse = Reuse.over(loaded, self._store, settings, costs, self._named)
        planner = None if self._reuse is None else self._reuse.planner()
        self._pipeline = Pipeline(loaded, self._requests, planner, self._local_decoder)
        try:
            self._configured({"calibrated_for": reuse.calibrated_for})
        except ConfigError:
            self._store.close()
            raise
        self._tier_bytes = tier_bytes(settings, self._store.tiers, loaded.device)
        self._requests.configure(max_running, kv_bytes, tiers=self._tier_bytes)
        self._lifecycle = Lifecycle()
        self._lock.join()

    @typed_memory_errors
    def precompute(
        self,
        texts: Iterable[str],
        *,
        document: str | None = None,
        revision: str | None = None,
        expires_in: float | None = None,
        neighbours: bool = False,
        show_progress: bool | None = False,
        **overrides: Unpack[ReuseOptions],
    ) -> PrecomputeReport:
        """Encode the chunks that are not stored yet.

        Raises StoreFullError if the disk or the quota is full, or would be; stored chunks remain.

        Parameters
        ----------
        document
            The name of a document whose chunks are exactly these texts. Its previous chunks are
            deleted, unless they also belong to a different document.
        revision
            The document's state, such as its hash: chunks of the same revision stay.
        expires_in
            Seconds until the chunks expire; the latest of several times holds. None: never.
        neighbours
            Also compute each chunk behind the chunks before it: answers are nearer to a full
            prefill's, for three times the ingestion's time and twice the space.
        show_progress
            Report progress on standard error; None shows a bar in a terminal, and lines elsewhere.
        """
        setting, chunks = self._configured(overrides), check_texts(texts)
        if self._reuse is None:
            return PrecomputeReport()
        with self._lifecycle:
            return self._reuse.precompute(
                chunks,
                setting,
                document,
                revision,
                expires_in,
                neighbours=neighbours,
                show_progress=show_progress,
            )

    @typed_memory_errors
    def contains(self, text: str, **overrides: Unpack[ReuseOptions]) -> bool:
        """Whether the chunk is stored for this model behind this sink."""
        config, _ = self._configured(overrides)
        with self._lifecycle:
            corpus = None if self._reuse is None else self._reuse.corpus
            return corpus is not None and corpus.contains(text, corpus.sinks.configured(config))

    def forget(self, text: str | None = None, *, document: str | None = None) -> int:
        """Delete a chunk or a document's own chunks, history included; return their number."""
        if (text is None) == (document is None):
            raise ConfigError("forget takes a chunk's text or document=..., one of them")
        owner = self._store if self._reuse is None else self._reuse
        with self._lifecycle:
            if text is None:
                return owner.forget_document(check_document(document))
            return int(owner.delete(check_chunk(text)) > 0)

    @typed_memory_errors
    def prefetch(
        self,
        texts: Sequence[str],
        *,
        for_next_answer: bool = True,
        **overrides: Unpack[ReuseOptions],
    ) -> None:
        """Name retrieved chunks, and start loading them in the background.

        Chunks that are not stored are encoded after the next answer whose prompt contains them,
        unless ``on_miss`` is ``"skip"``. The next answer's report explains every chunk that was not
        reused. Calls that name their chunks (``retrieved``) need no ``for_next_answer``.
        """
        with self._lifecycle:
            named = [text.strip() for text in check_texts(texts)]
            if for_next_answer:
                self._named.add(named)
            if self._reuse is not None:
                self._reuse.load(named, self._configured(overrides))

    @typed_memory_errors
    def warm_up(self, **overrides: Unpack[ReuseOptions]) -> None:
        """Prepare for the first answer: pack weights, encode the sink, run a prompt."""
        config, method = self._configured(overrides)
        with self._lifecycle:
            if self._reuse is not None:
                self._reuse.warm_up(config, method)
            self._pipeline.warm_up(config, method)
        if self._decoder is not None:
            self.generate("The", max_new_tokens=1)

    def wait(self) -> None:
        """Return when all background loading and encoding is done.

        Raises ModelInUseError if the calling thread holds the model, which that work can wait for.
        """
        self._lock.refuse_reentry()
        with suppress(ClosedError), self._lifecycle:
            if self._reuse is not None:
                self._reuse.background.wait()

    @typed_memory_errors
    def prefill(
        self,
        prompt: Prompt,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **overrides: Unpack[ReuseOptions],
    ) -> Prefilled:
        """Repair the prompt's cache and return the next token's logits."""
        clock = Clock()
        chat = prompt_of(prompt, chat_template_kwargs)
        request = Request(chat, *self._configured(overrides), clock, named=self._named.take())
        with self._lifecycle:
            computed = self._pipeline.prefill(request)
            (logits, cache), plan = computed.prefilled, computed.plan
            report = self._report(request, plan, time.perf_counter())
            self._follow_up(request, plan)
        return Prefilled(logits, plan.ids.tolist(), cache, report, plan.repair.copies)

    def generate(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> Completion:
        """Answer a prompt: a string (completed verbatim), chat messages, or :class:`TokenIds`.

        Parameters
        ----------
        **options
            Fields of :class:`ragkv.DecodeConfig`, and of :class:`ragkv.ReuseConfig` for this call;
            ``chat_template_kwargs``, variables of the chat template; ``retrieved``, the chunks
            retrieved for the prompt, each of which the report accounts for.
        """
        request, decode = self._request(prompt, **options)
        with self._lifecycle:
            return self._complete(request, decode)

    def stream(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> CompletionStream:
        """Answer like :meth:`generate`, piece by piece, in a separate thread."""
        request, decode = self._request(prompt, **options)
        return self._lifecycle.run_in_thread(
            partial(self._complete, request, decode),
            partial(CompletionStream, holds_model=partial(getattr, self._lock, "is_mine")),
        )

    def _request(
        self,
        prompt: Prompt,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        retrieved: Sequence[str] = (),
        **options: Any,
    ) -> tuple[Request, DecodeConfig]:
        drawing = {name: options.pop(name) for name in DECODE_SETTINGS if name in options}
        chat = prompt_of(prompt, chat_template_kwargs)
        decode = with_calls(DecodeConfig(**drawing), chat, self.tokenizer)
        clock, (config, method) = Clock(), self._configured(options)
        texts = tuple(text.strip() for text in check_texts(retrieved))
        named, most, decoder = self._named.take(), decode.max_new_tokens, self._decoder
        remote = None if decoder is None else decoder(self._loaded, self.namespace, decode)
        return Request(chat, config, method, clock, most, texts, named, remote), decode

    @typed_memory_errors
    def _complete(
        self,
        request: Request,
        decode: DecodeConfig,
        on_text: OnText = lambda _: None,
        cancelled: Callable[[], bool] | None = None,
        progress: Progress | None = None,
    ) -> Completion:
        answer = AnswerText(self.tokenizer, stops_of(self._loaded, decode), request.prompt)
        listener = Listener(
            lambda token: on_text(answer.feed(token)),
            progress=progress,
            top=decode.logprobs if request.remote is None else None,  # remote decoders record them
            ends=lambda: answer.is_complete,
        )
        plan, drawn = self._pipeline.generate(
            request, decode, listener=listener, cancelled=cancelled
        )
        report = self._report(request, plan, drawn.first_token_at, drawn)
        on_text(answer.finish(cut_off=drawn.finish_reason != "stop"))
        self._follow_up(request, plan)
        ids, reason, schema = drawn.token_ids, drawn.finish_reason, decode.json_schema
        return answer.completion(ids, report, reason, drawn.logprobs, schema)

    def _report(
        self, request: Request, plan: Plan, first_token_at: float, drawn: Drawn | None = None
    ) -> ReuseReport:
        account_of = unsupported_account if self._reuse is None else self._reuse.account
        account, dtype = account_of(request, plan), arithmetic_of(self._loaded.model)
        return report_of(request, plan, first_token_at, dtype=dtype, drawn=drawn, account=account)

    def _follow_up(self, request: Request, plan: Plan) -> None:
        if self._reuse is not None:
            self._reuse.background.schedule_followups(request, plan)

    def turn(self) -> AbstractContextManager[object]:
        """Hold the model's lock in the block, which makes direct calls of the model faster."""
        with self._lifecycle:
            return self._lock

    @property
    def loaded(self) -> LoadedModel:
        """The model with its tokenizer, to make a second engine over it."""
        return self._loaded

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._loaded.tokenizer

    @property
    def info(self) -> ModelInfo:
        """The model's name, fingerprint and positions, and whether its caches can be reused."""
        return info_of(self._loaded, self._reuse)

    def status(self) -> EngineStatus:
        """Return the running requests and the use of each tier."""
        return status_of(self._requests, self._reuse)

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def render(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
        """Return a prompt's text as the model reads it."""
        return render(prompt_of(prompt, chat_template_kwargs), self.tokenizer).text

    def sink_from(
        self,
        template: str | Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a prompt template's text before its first field, with the tools' definitions."""
        return template_head(template, self.tokenizer, tools, chat_template_kwargs)

    def _configured(self, overrides: Mapping[str, Any]) -> tuple[ReuseConfig, Method]:
        config = self.reuse.override(**overrides) if overrides else self.reuse
        method = method_of(config)
        if "calibrated_for" in overrides and self._reuse is not None:
            check_calibration(config, self._loaded.name, self._reuse.corpus.sinks.fingerprint)
        return config, method

    def close(self) -> None:
        """Wait for running answers, finish background work and release the store.

        Later calls raise ClosedError. A forked process does nothing. Raises ModelInUseError if
        the calling thread holds the model.
        """
        if self._lifecycle.forked:
            return
        self._lock.refuse_reentry()
        if self._lifecycle.close():
            if self._reuse is not None:
                self._reuse.background.close()
            if self._local_decoder is not None:
                self._local_decoder.close()
            self._requests.configure(tiers=-self._tier_bytes)
            with self._lock:
                if self._lock.leave():
                    release_kept(self._loaded)
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
