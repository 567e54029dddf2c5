"""Structured prediction by constrained decoding."""

# ruff: noqa: SLF001  of a copy of the same object

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Self

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.llms.llm import LLM
from llama_index.core.output_parsers.utils import extract_json_str
from llama_index.core.program.streaming_utils import process_streaming_content_incremental
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.ragkv.last_answer import LastAnswer
from llama_index.llms.ragkv.responses import as_chat, as_completion, cut_off

from ragkv import Completion
from ragkv.errors import CutOffError

_OF_CALLS = ("tool_choice", "tool_required", "allow_parallel_tool_calls")
"""LlamaIndex's settings of tool calls, which constrained decoding does not use."""
Given = dict[str, Any] | None


class StructuredPrediction(LastAnswer):
    """The part of RagKVLLM whose answers are objects of a pydantic class.

    The model is held to the class's JSON schema (extra ``ragkv[structured]``). Another
    ``pydantic_program_mode`` than the default is LlamaIndex's own program.
    """

    def structured_predict(
        self, output_cls: Any, prompt: PromptTemplate, llm_kwargs: Given = None, **prompt_args: Any
    ) -> Any:
        """Return an object of ``output_cls``.

        Raises
        ------
        CutOffError
            The answer reached ``max_new_tokens`` before its end. It is a ValueError.
        """
        if not self._is_held:
            with self._in_program() as llm:
                return LLM.structured_predict(llm, output_cls, prompt, llm_kwargs, **prompt_args)
        arguments = self._chat_arguments(output_cls, prompt, llm_kwargs, prompt_args)
        return _object(output_cls, self.chat(**arguments))

    async def astructured_predict(
        self, output_cls: Any, prompt: PromptTemplate, llm_kwargs: Given = None, **prompt_args: Any
    ) -> Any:
        """Return an object as :meth:`structured_predict` does; the event loop goes on."""
        if not self._is_held:
            with self._in_program() as llm:
                return await LLM.astructured_predict(
                    llm, output_cls, prompt, llm_kwargs, **prompt_args
                )
        arguments = self._chat_arguments(output_cls, prompt, llm_kwargs, prompt_args)
        return _object(output_cls, await self.achat(**arguments))

    def _structured_stream_call(
        self, output_cls: Any, prompt: PromptTemplate, llm_kwargs: Given = None, **prompt_args: Any
    ) -> Generator[Any, None, None]:
        """Yield the object as far as it is known, piece by piece."""
        if not self._is_held:
            with self._in_program() as llm:
                yield from LLM._structured_stream_call(
                    llm, output_cls, prompt, llm_kwargs, **prompt_args
                )
            return
        known, arguments = None, self._chat_arguments(output_cls, prompt, llm_kwargs, prompt_args)
        for response in self.stream_chat(**arguments):
            known = _known_of(output_cls, response, known)
            yield known

    async def _structured_astream_call(
        self, output_cls: Any, prompt: PromptTemplate, llm_kwargs: Given = None, **prompt_args: Any
    ) -> AsyncGenerator[Any, None]:
        """Return an iterator of the object as far as it is known, piece by piece."""
        if not self._is_held:
            return self._of_program(output_cls, prompt, llm_kwargs, **prompt_args)
        arguments = self._chat_arguments(output_cls, prompt, llm_kwargs, prompt_args)

        async def objects() -> AsyncGenerator[Any, None]:
            known = None
            async for response in await self.astream_chat(**arguments):
                known = _known_of(output_cls, response, known)
                yield known

        return objects()

    async def _of_program(self, *given: Any, **prompt_args: Any) -> AsyncGenerator[Any, None]:
        with self._in_program() as llm:
            async for known in await LLM._structured_astream_call(llm, *given, **prompt_args):
                yield known

    @contextmanager
    def _in_program(self) -> Iterator[Self]:
        """Yield a copy of the LLM for one call of a program.

        Raises
        ------
        CutOffError
            The answer's JSON or tool call was cut off.
        """
        with self._for_one_call() as llm:
            try:
                yield llm
            except ValueError as error:
                raise _cut_off(llm._last) or error from error
            if cut := _cut_off(llm._last):
                raise cut

    @property
    def _is_held(self) -> bool:
        """Whether answers are held to the schema."""
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    def _chat_arguments(
        self, output_cls: Any, prompt: PromptTemplate, llm_kwargs: Given, prompt_args: Any
    ) -> dict[str, Any]:
        messages: list[ChatMessage] = self._get_messages(prompt, **prompt_args)
        schema = output_cls.model_json_schema()
        given = {name: each for name, each in (llm_kwargs or {}).items() if name not in _OF_CALLS}
        return {"messages": messages, "json_schema": schema, **given}


def _object(output_cls: Any, response: ChatResponse) -> Any:
    """Return the object of an answer; raise CutOffError where the answer has no end."""
    try:
        return output_cls.model_validate_json(response.message.content or "")
    except ValueError as error:
        raise cut_off(response) or error from error


def _cut_off(answer: Completion | None) -> CutOffError | None:
    """Return the error of an answer whose JSON or tool call was cut off, else None."""
    if answer is None or answer.tool_calls:
        return None
    try:
        json.loads(extract_json_str(answer.text))
    except ValueError:
        return cut_off(as_chat(as_completion(answer)))
    return None


def _known_of(output_cls: Any, response: ChatResponse, known: Any) -> Any:
    """Return the object as far as a stream's response has it, after ``known``."""
    if cut_off(response):
        return _object(output_cls, response)
    return process_streaming_content_incremental(response, output_cls, known)
