"""RagKV: precompute chunks, find them in prompts, place, repair, decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ragkv.config import DecodeConfig, ReuseConfig, StoreConfig
from ragkv.decode import static
from ragkv.decode.generate import Drawn, draw
from ragkv.decode.overlapped import overlapping
from ragkv.decode.stopping import stops_of
from ragkv.decode.text import TextPieces
from ragkv.engine.auxiliaries import Auxiliaries
from ragkv.engine.background import Background, Calls
from ragkv.engine.corpus import Corpus, Sink
from ragkv.engine.inputs import check_calibration, listed, verified
from ragkv.engine.pipeline import Attempt, Pipeline, retry_without_corrupt
from ragkv.engine.plan import Prepared
from ragkv.engine.stream import Cancelled, Completion, CompletionStream, Prefilled, Speak
from ragkv.errors import ClosedError, ConfigError
from ragkv.model.load import LoadedModel, load_model, pretrained
from ragkv.model.lock import lock_of
from ragkv.prompt.render import Message, Prompt, chat_head, template_head, undated
from ragkv.recompute.copy_repair import Ahead
from ragkv.recompute.copy_steps import repairing_ahead
from ragkv.report.account import PrecomputeReport
from ragkv.report.clock import Clock
from ragkv.select import method_of
from ragkv.splice.overlap import OverlappedCache
from ragkv.store import open_store


class RagKV:
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

    Raises
    ------
    ModelNotFoundError, UnsupportedModelError, StoreError, ConfigError
    """

    pretrained = staticmethod(pretrained)

    def __init__(
        self,
        model: str | Path | PreTrainedModel | LoadedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        store: str | Path | StoreConfig | None = None,
        reuse: ReuseConfig = ReuseConfig(),  # noqa: B008  frozen
        namespace: str = "default",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        on_unsupported: Literal["raise", "full"] = "raise",
    ) -> None:
        if not isinstance(reuse, ReuseConfig):
            raise ConfigError(f"reuse must be a ReuseConfig, not {reuse!r}")
        method_of(reuse)
        self.reuse = reuse
        self.namespace = namespace
        self._loaded = load_model(
            model, tokenizer, device=device, dtype=dtype, on_unsupported=on_unsupported
        )
        if not isinstance(model, LoadedModel) and self.supported:
            self._loaded = verified(self._loaded, on_unsupported)
        self._lock = lock_of(self._loaded.model)
        self._store = open_store(store, namespace, device=self._loaded.device)
        self._read_only = isinstance(store, StoreConfig) and store.read_only
        codec = store.codec if isinstance(store, StoreConfig) else "raw"
        make = partial(Corpus, store=self._store, lock=self._lock, codec=codec)
        self._corpus = make(self._loaded)
        try:
            self._configured({"calibrated_for": reuse.calibrated_for})
        except ConfigError:
            self._store.close()
            raise
        self._auxiliaries = Auxiliaries(self._corpus, make)
        self._repairer = Pipeline(self._corpus, self._auxiliaries.scorer)
        self._calls = Calls()
        self._lock.join()
        self._background = Background(self._corpus, keeps=self.supported and not self._read_only)

    # ---- ingestion

    def precompute(
        self,
        texts: Iterable[str],
        *,
        document: str | None = None,
        expires_in: float | None = None,
        show_progress: bool = False,
        **overrides: Any,
    ) -> PrecomputeReport:
        """Encode the chunks that are not stored yet.

        Parameters
        ----------
        document
            Any name of what the texts are *all* the chunks of. Chunks that it held before
            and holds no longer are removed, unless another document holds them.
        expires_in
            Seconds from now on after which the chunks are no longer used. A chunk that is
            given several times lives longest; None is for ever, for new chunks.

        Raises
        ------
        StoreFullError
            The disk or quota is full; what was stored before remains.
        """
        config, chunks = self._configured(overrides), listed(texts)
        if not self.supported:
            return PrecomputeReport()
        given: dict[str, Any] = {"document": document, "expires_in": expires_in}
        with self._calls:
            corpora = [(self._corpus, self._sink(config))]
            if method_of(config).auxiliary:
                corpora.append(self._auxiliaries.corpus(config))
            reports = [
                corpus.encode(chunks, sink, show_progress=show_progress, **given)
                for corpus, sink in corpora
            ]
        return reports[0]

    def contains(self, text: str, **overrides: Any) -> bool:
        """Whether the chunk can be reused: stored for this model behind this sink."""
        config = self._configured(overrides)
        with self._calls:
            return self.supported and self._corpus.contains(text, self._sink(config))

    def forget(self, text: str) -> bool:
        """Remove a chunk from the store; return whether it was there."""
        with self._calls:
            return self._corpus.forget(text)

    def forget_document(self, document: str) -> int:
        """Remove the chunks that only this document holds; return how many."""
        with self._calls:
            return self._corpus.forget_document(document)

    def prefetch(self, texts: Sequence[str], **overrides: Any) -> None:
        """Name the chunks that were retrieved; start loading them in the background.

        Those that are not stored are encoded after the next answer whose prompt
        contains them, unless ``on_miss`` is ``"skip"``.
        """
        with self._calls:
            if self.supported:
                sink_of = partial(self._sink, self._configured(overrides))
                self._background.fetch(listed(texts), sink_of)

    def wait(self) -> None:
        """Return when all background loading and encoding is done.

        Raises
        ------
        ModelInUseError
            The calling thread itself holds the model, which that work may wait for.
        """
        self._lock.refuse_mine()
        with suppress(ClosedError), self._calls:
            self._background.wait()

    # ---- answering

    def prefill(self, prompt: Prompt, **overrides: Any) -> Prefilled:
        """Repair the prompt's cache and return the next token's logits."""
        clock = Clock()
        config = self._configured(overrides)
        with self._calls:
            with self._turn(clock):
                ready, logits, cache = self._repairer.prefill(prompt, config, self._sink, clock)
                self._background.look_for_named(ready)
                report = ready.report(config, clock, time.perf_counter())
            self._background.after(ready, config, self._sink)
        ids, ahead = ready.ids.tolist(), ready.ahead
        if ahead is None and not isinstance(cache, OverlappedCache):
            return Prefilled(logits, ids, cache, report)
        return Prefilled(logits, ids, cache, report, partial(self._decoding, cache, ahead), ahead)

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
        cache_implementation: Literal["static"] | None = None,
        **overrides: Any,
    ) -> Completion:
        """Answer a prompt: a string (completed verbatim) or a list of chat messages.

        The settings are those of :class:`ragkv.config.DecodeConfig`; ``overrides`` are fields of
        ReuseConfig, for this call alone.
        """
        clock = Clock()
        drawing = (max_new_tokens, temperature, top_p, stop, seed, top_k, stop_token_ids)
        settings = self._drawing(overrides, *drawing, cache_implementation)
        with self._calls:
            return self._complete(prompt, settings, clock)

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
        cache_implementation: Literal["static"] | None = None,
        **overrides: Any,
    ) -> CompletionStream:
        """Answer like :meth:`generate`, piece by piece, in a thread of its own."""
        clock = Clock()
        drawing = (max_new_tokens, temperature, top_p, stop, seed, top_k, stop_token_ids)
        settings = self._drawing(overrides, *drawing, cache_implementation)
        return self._calls.run_in_thread(
            partial(self._complete, prompt, settings, clock),
            partial(CompletionStream, held=partial(getattr, self._lock, "is_mine")),
        )

    def _complete(
        self,
        prompt: Prompt,
        settings: tuple[ReuseConfig, DecodeConfig],
        clock: Clock,
        speak: Speak = lambda _: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Completion:
        config, decode = settings
        pieces = TextPieces(self.tokenizer, stops_of(self._loaded, decode))

        def answer(attempt: Attempt) -> tuple[Prepared, Drawn]:
            asked = prompt, config, self._sink, clock, attempt
            ready = self._repairer.prepare(*asked, answer=decode.max_new_tokens)
            with self._repairer.recomputing_first(ready, clock):
                return ready, draw(
                    self._loaded,
                    ready.ids,
                    ready.cache,
                    decode,
                    on_token=lambda token: speak(pieces.feed(token)),
                    cancelled=cancelled,
                )

        with self._turn(clock):
            if cancelled():
                raise Cancelled
            ready, drawn = retry_without_corrupt(answer)
            self._background.look_for_named(ready)
            report = ready.report(config, clock, drawn.first_token_at, len(drawn.token_ids))
        speak(pieces.finish())
        self._background.after(ready, config, self._sink)
        return Completion(pieces.text(), drawn.token_ids, report)

    def turn(self) -> AbstractContextManager[object]:
        """Hold the model in the block, for calls of your own that are to run alone.

        Calls beside ragkv's are right, too, but both are slower then.
        """
        with self._calls:
            return self._lock

    @contextmanager
    def _turn(self, clock: Clock) -> Iterator[None]:
        """Wait for the model; one request uses it at a time."""
        with clock.step("wait"):
            self._lock.acquire()
        try:
            with self._loaded.without_autocast():
                yield
        finally:
            self._lock.release()

    @contextmanager
    def _decoding(self, cache: Cache, ahead: Ahead | None) -> Iterator[None]:
        """Hold the model, which decodes over overlapping chunks, or repairs ahead."""
        loaded = self._loaded
        with (
            self._lock,
            loaded.without_autocast(),
            overlapping(loaded, cache),
            repairing_ahead(loaded, cache, ahead),
        ):
            yield

    # ---- what is configured

    def sink_from(self, template: str | Sequence[Message]) -> str:
        """Return the text that a prompt template puts before its first field."""
        return template_head(template, self.tokenizer)

    def _sink(self, config: ReuseConfig) -> Sink:
        if not method_of(config).sink:
            return self._corpus.sink("")
        if config.sink == "auto":
            return self._corpus.sink(chat_head(self.tokenizer))
        return self._corpus.sink(undated(config.sink, self.tokenizer))

    def _configured(self, overrides: dict[str, Any]) -> ReuseConfig:
        config = self.reuse.override(**overrides) if overrides else self.reuse
        method_of(config)
        if "calibrated_for" in overrides and self.supported:
            check_calibration(config, self._loaded.name, self._corpus.fingerprint)
        return config

    def _drawing(self, overrides: dict[str, Any], *given: Any) -> tuple[ReuseConfig, DecodeConfig]:
        config, decode = self._configured(overrides), DecodeConfig(*given)
        return static.steps_alone(config, decode), decode

    @property
    def loaded(self) -> LoadedModel:
        """The model with all that ragkv knows of it."""
        return self._loaded

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model."""
        return self._loaded.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._loaded.tokenizer

    @property
    def fingerprint(self) -> str | None:
        """Digest of all that chunk caches depend on, of the model as it is now, without sink.

        None for a model whose caches cannot be reused.
        """
        return self._corpus.fingerprint.digest if self.supported else None

    @property
    def model_name(self) -> str:
        """Hub name, folder, or class name of a model without one."""
        return self._loaded.name

    @property
    def supported(self) -> bool:
        """Whether chunks can be reused with this model."""
        return self._loaded.architecture is not None

    @property
    def unsupported_reason(self) -> str:
        """Why chunks cannot be reused; empty if they can."""
        return self._loaded.unsupported

    def close(self) -> None:
        """Wait for the answers under way, finish background work and release the store.

        Calls after it raise ClosedError. In a forked process it does nothing. Raises
        ModelInUseError where the calling thread itself holds the model.
        """
        if self._calls.forked:
            return
        self._lock.refuse_mine()
        if self._calls.close():
            self._background.close()
            with self._lock:
                if self._lock.leave():
                    self._loaded.workspace.release()
                    static.release(self.model)
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
