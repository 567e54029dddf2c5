"""RagKVPipeline: langchain_huggingface's HuggingFacePipeline, answering from chunk caches."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any, ClassVar, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_huggingface import HuggingFacePipeline
from pydantic import model_validator
from transformers import pipeline as make_pipeline

from langchain_ragkv.engine import ChunkReuse
from langchain_ragkv.generation import PipelineSettings, read_settings
from langchain_ragkv.pieces import apieces, in_turn, pieces
from langchain_ragkv.responses import metadata, usage
from ragkv import Completion, RagKV
from ragkv.errors import ConfigError
from ragkv.serve.client import RemoteRagKV

_log = logging.getLogger(__name__)
_OURS = ("pipeline_kwargs", "skip_prompt", "stream")
_OF_RUNS = ("tags", "metadata", "run_name", "run_id")
_CALL: ContextVar[dict[str, Any]] = ContextVar("ragkv_call", default={})  # noqa: B039  never changed
"""What the call under way was given, which LangChain leaves out of its cache's keys."""


class RagKVPipeline(ChunkReuse, HuggingFacePipeline):
    """A one-word swap for ``HuggingFacePipeline``, from ``pipeline=`` or ``from_model_id``.

    It keeps that class's keywords and meaning (``pipeline_kwargs``, ``skip_prompt``, the
    prompt in the text unless ``return_full_text=False``); at ``recompute_ratio=1`` its
    greedy text is the same. Kept here, where the original passes them over, are ``stop``
    and, per call, ``max_new_tokens``, ``temperature``, ``top_p``, ``seed`` and the engine's
    reuse settings. ``kv=RagKV(...)`` stands for ``pipeline`` where there is none.

    With ``on_unsupported="full"`` a prompt whose settings the engine does not have (beam
    search, for one) is served by the ordinary pipeline.
    """

    _chat: ClassVar[bool] = False

    @classmethod
    def from_model_id(cls, model_id: str, *args: Any, **kwargs: Any) -> Self:
        """Load a model as ``HuggingFacePipeline`` does; wrong settings are said before it.

        Raises
        ------
        ConfigError, UnknownMethodError
            A setting is wrong.
        ModelNotFoundError
            There is no such folder.
        """
        names = ("recompute_ratio", "method")
        reuse = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        own = {name: kwargs[name] for name in ("store", "namespace") if name in kwargs}
        RagKV.check_settings(None, reuse, model=model_id, **own)
        return cast("Self", super().from_model_id(model_id, *args, **kwargs))

    @model_validator(mode="before")
    @classmethod
    def _make_pipeline(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Make a pipeline over the engine's model where only an engine is given."""
        if values.get("pipeline") is not None:
            return values
        kv = values.get("kv")
        if kv is None:
            raise ConfigError("RagKVPipeline needs pipeline=... or kv=..., or use from_model_id.")
        if isinstance(kv, RemoteRagKV):
            raise ConfigError(
                "RagKVPipeline runs a pipeline of transformers in this process: for a server, use "
                "ChatRagKV(base_url=...)"
            )
        made = make_pipeline(
            "text-generation",
            model=kv.model,
            tokenizer=kv.tokenizer,
            device=kv.model.device,
            **(values.get("pipeline_kwargs") or {}),
        )
        return {**values, "pipeline": made, "model_id": kv.model_name}

    @model_validator(mode="after")
    def _check_pipeline(self) -> Self:
        """Refuse a pipeline that cannot be kept, now and not at the first prompt."""
        if self.pipeline.task != "text-generation":
            raise ConfigError(f"RagKVPipeline serves text-generation, not {self.pipeline.task}.")
        if self.kv.model is not self.pipeline.model:
            raise ConfigError("kv serves another model than pipeline: give one of the two.")
        if self.on_unsupported == "raise":
            read_settings(self.pipeline).check()
        return self

    def _make_engine(self) -> RagKV:
        return self._engine(self.pipeline.model, self.pipeline.tokenizer)

    @property
    def _llm_type(self) -> str:
        return "ragkv-pipeline"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        settings = {**asdict(read_settings(self.pipeline)), **_CALL.get()}
        return {**super()._identifying_params, **settings, **self._identity, **self._overrides()}

    def generate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Answer prompts, as LangChain has it."""
        with _call(kwargs):
            return super().generate(prompts, stop, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Answer prompts, as LangChain has it."""
        with _call(kwargs):
            return await super().agenerate(prompts, stop, *args, **kwargs)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        settings = self._settings(kwargs)
        if settings.unsupported:
            with self.kv.turn():
                return super()._generate(prompts, stop, run_manager, **kwargs)
        generations = []
        for prompt in prompts:
            arguments = self._arguments(settings, stop, kwargs)
            completion = self.kv.generate(prompt, **arguments)
            text = self._text(prompt, completion, settings, stop, kwargs)
            info = self._info(completion)
            generations.append([Generation(text=text, generation_info=info)])
        return LLMResult(generations=generations, llm_output={"model_name": self.kv.model_name})

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        settings = self._settings(kwargs)
        if settings.unsupported:
            return await super()._agenerate(prompts, stop, run_manager, **kwargs)
        generations = []
        for prompt in prompts:
            arguments = self._arguments(settings, stop, kwargs)
            stream = self.kv.stream(prompt, **arguments)
            async for _ in apieces(stream):
                pass
            text = self._text(prompt, stream.completion, settings, stop, kwargs)
            info = self._info(stream.completion)
            generations.append([Generation(text=text, generation_info=info)])
        return LLMResult(generations=generations, llm_output={"model_name": self.kv.model_name})

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        settings = self._settings(kwargs)
        if settings.unsupported:
            ordinary = super()._stream
            chunks = in_turn(self.kv, lambda: ordinary(prompt, stop, **kwargs))
        else:
            chunks = self._chunks(prompt, settings, stop, kwargs)
        for chunk in chunks:
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        settings = self._settings(kwargs)
        chunks = (
            super()._astream(prompt, stop, **kwargs)
            if settings.unsupported
            else self._achunks(prompt, settings, stop, kwargs)
        )
        async for chunk in chunks:
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _chunks(
        self, prompt: str, settings: PipelineSettings, stop: list[str] | None, call: dict[str, Any]
    ) -> Iterator[GenerationChunk]:
        arguments = self._arguments(settings, stop, call)
        if not call.get("skip_prompt", True):
            yield GenerationChunk(text=prompt)  # before there is a stream to be left
        stream = self.kv.stream(prompt, **arguments)
        given = 0
        for piece in pieces(stream):
            given += len(piece)
            yield GenerationChunk(text=piece)
        text = "" if stop else self._decode(stream.completion, settings)[given:]
        yield GenerationChunk(text=text, generation_info=self._info(stream.completion))

    async def _achunks(
        self, prompt: str, settings: PipelineSettings, stop: list[str] | None, call: dict[str, Any]
    ) -> AsyncIterator[GenerationChunk]:
        arguments = self._arguments(settings, stop, call)
        if not call.get("skip_prompt", True):
            yield GenerationChunk(text=prompt)
        stream = self.kv.stream(prompt, **arguments)
        given = 0
        async for piece in apieces(stream):
            given += len(piece)
            yield GenerationChunk(text=piece)
        text = "" if stop else self._decode(stream.completion, settings)[given:]
        yield GenerationChunk(text=text, generation_info=self._info(stream.completion))

    def _settings(self, call: dict[str, Any]) -> PipelineSettings:
        settings = read_settings(self.pipeline, call.get("pipeline_kwargs"))
        if self.on_unsupported == "raise":
            settings.check()
        elif settings.unsupported:
            _log.warning("the ordinary pipeline answers: %s", ", ".join(settings.unsupported))
        return settings

    def _arguments(
        self, settings: PipelineSettings, stop: list[str] | None, call: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the engine's arguments."""
        changes = {name: call[name] for name in call if name not in _OURS}
        arguments = settings.limited(changes.get("max_new_tokens"))
        texts = (*arguments.get("stop", ()), *(stop or ()))
        return {**arguments, "stop": texts, **self._overrides(changes)}

    def _text(
        self,
        prompt: str,
        completion: Completion,
        settings: PipelineSettings,
        stop: list[str] | None,
        call: dict[str, Any],
    ) -> str:
        """Return what the pipeline would: with the prompt, unless told otherwise."""
        text = completion.text if stop else self._decode(completion, settings)
        with_prompt = settings.full_text and not call.get("skip_prompt", False)
        return prompt + text if with_prompt else text

    def _decode(self, completion: Completion, settings: PipelineSettings) -> str:
        """Return the text as the pipeline decodes it: with the stop string at its end."""
        how = {"skip_special_tokens": True, **settings.decoding}
        return str(self.pipeline.tokenizer.decode(completion.token_ids, **how))

    def _info(self, completion: Completion) -> dict[str, Any]:
        self._keep(completion.report)
        return {**metadata(completion, self.kv), "usage_metadata": usage(completion)}


@contextmanager
def _call(given: dict[str, Any]) -> Iterator[None]:
    """Let a call's own settings be a part of what identifies its answers."""
    token = _CALL.set({name: given[name] for name in given if name not in _OF_RUNS})
    try:
        yield
    finally:
        _CALL.reset(token)
