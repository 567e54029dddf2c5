"""The fields of requests: those that are read, ignored, and refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from ragkv.config import checked_variables
from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat, TokenIds
from ragkv.prompt.messages import arguments_of, text_of
from ragkv.serve.messages import check_results, plain_message, without_nulls
from ragkv.serve.refusal import RefusedError, missing, not_without, unsupported, wrong_field

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
"""Fields that would change an answer, and are not supported: their values without effect."""

_INSTEAD = {"functions": ": use 'tools'", "function_call": ": use 'tool_choice'"}

Texts = Annotated[list[str], Field(fail_fast=True)]
"""A million wrong texts are one error."""

Text = Annotated[str, Tag("a text")]
Stops = Annotated[list[str], Field(fail_fast=True, max_length=16), Tag("a list")]
TEXT_OR_LIST = Discriminator(lambda given: "a list" if isinstance(given, list) else "a text")

TokenId = Annotated[int, Field(ge=0, le=2**31)]

Variables = Annotated[dict[str, Any], AfterValidator(checked_variables)]
"""Variables of the chat template."""


class Fields(BaseModel):
    """A JSON object, no more of it than is declared."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ReuseFields(Fields):
    """``"ragkv"``: how this call reuses chunks."""

    recompute_ratio: float | Literal["auto"] | None = None
    method: str | None = None
    sink: str | None = None
    history: bool = True

    def settings(self) -> dict[str, Any]:
        """Return the fields of ReuseConfig that are given; a server without history stays so."""
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
    include_obfuscation: bool = False  # random padding, which nothing here needs


class AnswerFields(Fields):
    """What chat and text completions have in common."""

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

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise not_without("stream_options", "stream")
        return self


class CalledFunction(Fields):
    """A function that an earlier answer called."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[dict[str, Any], BeforeValidator(arguments_of)] = {}


class Called(Fields):
    """A tool call in an earlier answer; what clients add to it, such as an index, is ignored."""

    model_config = ConfigDict(extra="ignore")

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Fields):
    """A chat message; its content is joined to one text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: Annotated[list[Called], Field(fail_fast=True)] = []
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""

    @field_validator("role", mode="before")
    @classmethod
    def _known_role(cls, role: object) -> object:
        if role == "function":
            raise unsupported("messages", f"messages with the role {role!r}")
        return "system" if role == "developer" else role  # its newer name

    @field_validator("content", mode="before")
    @classmethod
    def _as_text(cls, content: object) -> object:
        try:
            return text_of(content) if isinstance(content, list) else content
        except ConfigError as error:
            raise RefusedError(
                400, f"messages: {error}.", param="messages", code="unsupported_parameter"
            ) from None

    @property
    def plain(self) -> dict[str, Any]:
        """The message without what is empty; only a tool's result has a name for templates."""
        names = {"role", "content"} | {name for name, value in self if value}
        if self.role != "tool":
            names.discard("name")
        return self.model_dump(include=names)


class NamedFunction(Fields):
    """The tool that has to be called."""

    name: str


class NamedTool(Fields):
    """``"tool_choice"`` with a name."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Fields):
    """Some of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)]


class SomeTools(Fields):
    """``"tool_choice"`` among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_OF_CHOICE = ("tool_choice", "allowed_tools")
_KINDS_OF_CHOICE = {"function": "a tool", "allowed_tools": "some tools"}


def _kind_of_choice(given: object) -> str:
    if isinstance(given, Fields):
        return "some tools" if isinstance(given, SomeTools) else "a tool"
    if not isinstance(given, Mapping):
        return "a word"
    kind = given.get("type", "function")
    if kind not in _KINDS_OF_CHOICE:
        raise unsupported("tool_choice", f"a tool_choice of the type {kind!r}")
    return _KINDS_OF_CHOICE[kind]


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("a word")]
    | Annotated[NamedTool, Tag("a tool")]
    | Annotated[SomeTools, Tag("some tools")],
    Discriminator(_kind_of_choice),
]


class NamedSchema(Fields):
    """``"json_schema"`` of a response format."""

    name: str = ""
    description: str = ""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = {"type": "object"}
    strict: bool = False


class ResponseFormat(Fields):
    """``"response_format"``; a JSON object may have its schema beside it, as other servers take."""

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
        """The JSON schema that answers follow."""
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
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat(type="text")
    chat_template_kwargs: Variables = {}

    @field_validator("messages", mode="before")
    @classmethod
    def _plain(cls, messages: object) -> object:
        return list(map(plain_message, messages)) if isinstance(messages, list) else messages

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise not_without("top_logprobs", "logprobs")
        check_results(self.messages)
        return self

    @property
    def chat(self) -> Chat:
        """The prompt.

        Raises
        ------
        RefusedError
            400: a tool, or the choice of one, is wrong.
        """
        choice = self.tool_choice
        given = choice if isinstance(choice, str) else choice.model_dump()
        try:
            return Chat(
                [each.plain for each in self.messages],
                self.tools,
                given,
                parallel_tool_calls=self.parallel_tool_calls,
                chat_template_kwargs=self.chat_template_kwargs,
            )
        except ConfigError as error:
            of_choice = self.tools and str(error).startswith(_OF_CHOICE)
            param = "tool_choice" if of_choice else "tools"
            raise RefusedError(400, str(error), param=param, code="invalid_value") from error


class CompletionFields(AnswerFields):
    """The body of ``/v1/completions``; :func:`prompts_in` reads its prompt."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


Body = TypeVar("Body", bound=Fields)


def parse(kind: type[Body], given: Mapping[str, Any]) -> Body:
    """Read a body; fields that are null count as absent, at any depth.

    Raises
    ------
    RefusedError
        400, naming the field that is unknown, unsupported or wrong.
    """
    fields = without_nulls(dict(given))
    if issubclass(kind, AnswerFields):
        for name, values in NEUTRAL.items():
            if name in fields and fields.pop(name) not in values:
                raise unsupported(name, name + _INSTEAD.get(name, ""))
        fields = {name: value for name, value in fields.items() if name not in IGNORED}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise wrong_field(error) from None


def prompts_in(prompt: object) -> list[str | TokenIds]:
    """Return the prompts of a text completion: texts, or token ids.

    Raises
    ------
    RefusedError, ConfigError
        It is neither.
    """
    prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if prompts and all(type(each) is int for each in prompts):
        prompts = [prompts]
    if not prompts or not all(map(_is_prompt, prompts)):
        message = "prompt: give a text or token ids, or a list of such."
        raise RefusedError(400, message, param="prompt", code="invalid_value")
    return [each if isinstance(each, str) else TokenIds(each) for each in prompts]


def _is_prompt(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt))


def plain_messages(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    chat_template_kwargs: dict[str, Any],
) -> Chat:
    """Return messages and tools as the engine reads them.

    Raises
    ------
    RefusedError
        400: one of them is no text, or no tool.
    """
    given = {"messages": messages, "tools": tools, "chat_template_kwargs": chat_template_kwargs}
    return parse(ChatFields, given).chat
