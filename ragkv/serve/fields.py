"""The fields of requests for answers: read, ignored, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from ragkv.config import checked_variables
from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat, TokenIds
from ragkv.serve.body import Fields, parse
from ragkv.serve.messages import Message, check_results, read_message
from ragkv.serve.refusal import RefusedError, missing, not_without, unsupported

IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)
"""Fields of OpenAI's API that change no answer of this server."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Unsupported fields that would change an answer, with their values without effect."""

_REPLACEMENTS = {"functions": ": use 'tools'", "function_call": ": use 'tool_choice'"}

Texts = Annotated[list[str], Field(fail_fast=True)]
"""Texts; validation stops at the first wrong one."""

Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]
Variables = Annotated[dict[str, Any], AfterValidator(checked_variables)]
"""Variables of the chat template."""

Text = Annotated[str, Tag("a text")]
Stops = Annotated[list[str], Field(fail_fast=True, max_length=16), Tag("a list")]
TEXT_OR_LIST = Discriminator(lambda given: "a list" if isinstance(given, list) else "a text")


class ReuseFields(Fields):
    """``"ragkv"``: how this call reuses chunks."""

    recompute_ratio: float | Literal["auto"] | None = None
    method: str | None = None
    sink: str | None = None
    history: bool = True

    def settings(self) -> dict[str, Any]:
        """Return the given fields of ReuseConfig; ``history`` can only be switched off."""
        given = self.model_dump(
            include={"recompute_ratio", "method", "sink"}, exclude_none=True, mode="python"
        )
        return given if self.history else {**given, "history": False}


class AnswerReuse(ReuseFields):
    """``"ragkv"`` of a request for an answer."""

    retrieved: Texts = []
    report: bool = False


class StreamOptions(Fields):
    """``"stream_options"``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # random padding, not needed here


class AnswerFields(Fields):
    """The common fields of chat and text completions."""

    model: str = "default"
    n: Annotated[int, Field(ge=1)] = 1
    stop: Annotated[Text | Stops, TEXT_OR_LIST] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] = []
    ignore_eos: bool = False
    sparse: Literal["off", "auto"] = "off"
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ragkv: AnswerReuse = AnswerReuse()

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, values in NEUTRAL.items():
            if name in given and given[name] not in values:
                raise unsupported(name, name + _REPLACEMENTS.get(name, ""))
        without_effect = IGNORED | NEUTRAL.keys()
        return {name: value for name, value in given.items() if name not in without_effect}

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise not_without("stream_options", "stream")
        return self

    def decode_settings(self) -> dict[str, Any]:
        """Return the common settings of decoding, but the seed, as arguments of an engine."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": max(self.top_k, 0),
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "sparse": self.sparse,
            "generation": {"min_p": self.min_p, "repetition_penalty": self.repetition_penalty},
            "retrieved": self.ragkv.retrieved,
        }


class NamedSchema(Fields):
    """``"json_schema"`` of a response format."""

    name: str = ""
    description: str = ""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = {"type": "object"}
    strict: bool = False


class ResponseFormat(Fields):
    """``"response_format"``; a ``json_object`` can have a schema, as in other servers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_of_object: Annotated[dict[str, Any], Field(alias="schema")] = {"type": "object"}

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise missing("response_format.json_schema")
        if self.json_schema is not None and "json_schema" not in self.json_schema.model_fields_set:
            raise missing("response_format.json_schema.schema")
        return self

    @property
    def schema_of_answers(self) -> dict[str, Any] | None:
        """The JSON schema of the answers; None if they are free."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return self.schema_of_object
        return {**self.json_schema.json_schema, "strict": self.json_schema.strict}


class ChatFields(AnswerFields):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: Objects = []
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat(type="text")
    chat_template_kwargs: Variables = {}

    @field_validator("messages", mode="before")
    @classmethod
    def _read(cls, messages: object) -> object:
        return list(map(read_message, messages)) if isinstance(messages, list) else messages

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise not_without("top_logprobs", "logprobs")
        if isinstance(self.tool_choice, dict):
            kind = self.tool_choice.get("type", "function")
            if kind not in ("function", "allowed_tools"):
                raise unsupported("tool_choice", f"a tool_choice of the type {kind!r}")
        check_results(self.messages)
        return self

    @property
    def chat(self) -> Chat:
        """The prompt.

        Raises
        ------
        RefusedError
            400: a tool or the choice of one is wrong.
        """
        try:
            return Chat(
                [each.plain for each in self.messages],
                self.tools,
                self.tool_choice,
                parallel_tool_calls=self.parallel_tool_calls,
                chat_template_kwargs=self.chat_template_kwargs,
            )
        except ConfigError as error:
            of_choice = self.tools and str(error).startswith(("tool_choice", "allowed_tools"))
            param = "tool_choice" if of_choice else "tools"
            raise RefusedError(400, str(error), param=param, code="invalid_value") from error


def chat_of(messages: list[dict[str, Any]], tools: object, variables: object) -> Chat:
    """Return a chat; RefusedError, 400, if a message or a tool is wrong."""
    given = {"messages": messages, "tools": tools, "chat_template_kwargs": variables}
    return parse(ChatFields, given).chat


class CompletionFields(AnswerFields):
    """The body of ``/v1/completions``; :func:`prompts_in` reads its prompt."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def prompts_in(prompt: object) -> list[str | TokenIds]:
    """Return the prompts of a text completion: texts or token ids.

    Raises
    ------
    RefusedError, ConfigError
        A prompt has a wrong type.
    """
    prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        prompts = [prompt]
    if not prompts or not all(map(_is_prompt, prompts)):
        message = "prompt must be a text, token ids, or a list of either."
        raise RefusedError(400, message, param="prompt", code="invalid_value")
    return [each if isinstance(each, str) else TokenIds(each) for each in prompts]


def _is_prompt(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt))
