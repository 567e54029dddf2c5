"""RagKVLLM: a text model that answers from precomputed chunk caches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from langchain_ragkv.call import Call
from langchain_ragkv.load import decoding_fields
from langchain_ragkv.model import ChunkReuse
from ragkv import Completion
from ragkv.errors import ConfigError

_OF_RUNS = ("callbacks", "stop", "tags", "metadata", "run_name", "run_id")
"""Arguments of ``generate`` for LangChain; its cache's keys have ``stop`` anyway."""
_CALL: ContextVar[dict[str, Any]] = ContextVar("ragkv_call", default={})  # noqa: B039  never changed
"""Arguments of the current call, which LangChain omits from its cache's keys."""


class RagKVLLM(ChunkReuse, BaseLLM):
    """Completes texts: takes ``HuggingFacePipeline``'s place.

    The model reads prompts as they are, without its chat template. Answers are without the
    prompt, and without the stop text at their end. ``pipeline_kwargs`` hold per call, too.
    """

    _chat: ClassVar[bool] = False

    @property
    def _llm_type(self) -> str:
        return "ragkv-llm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, **_CALL.get()}

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer prompts, as LangChain has it."""
        with _identified(kwargs):
            return super().generate(prompts, *args, **kwargs)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer prompts, as LangChain has it."""
        with _identified(kwargs):
            return await super().agenerate(prompts, *args, **kwargs)

    def _text_call(self, stop: list[str] | None, given: dict[str, Any]) -> Call:
        if not given.pop("skip_prompt", True):
            raise ConfigError("skip_prompt=False: answers are without the prompt; put it before")
        if generation := given.pop("pipeline_kwargs", None):
            given = {**decoding_fields(generation, self.kv.info.generation_config), **given}
        if (most := given.pop("max_new_tokens", None)) is not None:
            given["max_tokens"] = most
        call = self._call(stop, given)
        if call.keywords.tools:
            raise ConfigError("tools need chat messages: use ChatRagKV")
        return call

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self.streaming and run_manager is not None:
            pieces = [list(self._stream(each, stop, run_manager, **kwargs)) for each in prompts]
            return self._result(list(map(_joined, pieces)))
        call = self._text_call(stop, kwargs)
        answers = [call.start(prompt).whole() for prompt in prompts]
        return self._result([_generation(call, answer) for answer in answers])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self.streaming and run_manager is not None:
            pieces = [
                [piece async for piece in self._astream(each, stop, run_manager, **kwargs)]
                for each in prompts
            ]
            return self._result(list(map(_joined, pieces)))
        call = self._text_call(stop, kwargs)
        answers = [await call.start(prompt).awhole() for prompt in prompts]
        return self._result([_generation(call, answer) for answer in answers])

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._text_call(stop, kwargs)
        with call.start(prompt) as stream:
            for piece in stream:
                chunk = GenerationChunk(text=piece)
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield GenerationChunk(text="", generation_info=_info(call, stream.completion))

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = self._text_call(stop, kwargs)
        async with call.start(prompt) as stream:
            async for piece in stream:
                chunk = GenerationChunk(text=piece)
                if run_manager:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield GenerationChunk(text="", generation_info=_info(call, stream.completion))

    def _result(self, answers: list[Generation]) -> LLMResult:
        generations: Any = [[answer] for answer in answers]
        return LLMResult(generations=generations, llm_output={"model_name": self.model_name})


def _generation(call: Call, answer: Completion) -> Generation:
    return Generation(text=answer.text, generation_info=_info(call, answer))


def _joined(pieces: list[GenerationChunk]) -> Generation:
    text = "".join(piece.text for piece in pieces)
    return Generation(text=text, generation_info=pieces[-1].generation_info)


def _info(call: Call, completion: Completion) -> dict[str, Any]:
    usage, metadata = call.account(completion)
    return {**metadata, "usage_metadata": usage}


@contextmanager
def _identified(given: dict[str, Any]) -> Iterator[None]:
    """Include a call's settings in the cache key of its answers."""
    token = _CALL.set({name: given[name] for name in given if name not in _OF_RUNS})
    try:
        yield
    finally:
        _CALL.reset(token)
