"""Keywords of calls that other chat models take, too, as LangChain's ChatOpenAI has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from pydantic import BaseModel, ValidationError

from langchain_ragkv.structured import json_schema_of
from langchain_ragkv.tools import definitions
from ragkv import ReuseConfig
from ragkv.config import DECODE_SETTINGS, check_known
from ragkv.errors import ConfigError

_SETTABLE_TO_NONE = ("timeout", "auxiliary_model", "calibrated_for")
"""Settings for which None is a value; for the rest it means "not given"."""

_WITHOUT_EFFECT = ("stream", "ls_structured_output_format")
"""LangChain's own keywords, for streaming and tracing."""


@dataclass(frozen=True, slots=True)
class Keywords:
    """A call's tools and response format, which are no settings of the engine.

    Attributes
    ----------
    tools, tool_choice, parallel_tool_calls
        Those of :class:`ragkv.Chat`.
    parse
        Makes the object of a ``response_format`` that is a class; None where there is none.
    """

    tools: Sequence[dict[str, Any]] = ()
    tool_choice: object = None
    parallel_tool_calls: bool = True
    parse: Callable[[str], Any] | None = None

    def parsed(self, text: str) -> dict[str, Any]:
        """Return the object of an answer as ``additional_kwargs``; empty where it is none."""
        with suppress(ValidationError):
            if self.parse is not None and text:
                return {"parsed": self.parse(text)}
        return {}


def read_keywords(given: dict[str, Any]) -> tuple[Keywords, dict[str, Any]]:
    """Divide a call's keywords into these and the engine's settings, by ChatRagKV's names.

    Parameters
    ----------
    given
        A call's keywords. Those that are None are not given.

    Raises
    ------
    ConfigError
        A keyword is unknown, or wrong.
    """
    given = {**given, **(given.get("extra_body") or {}), "extra_body": None}  # ChatOpenAI's
    rest = {
        name: value
        for name, value in given.items()
        if name not in _WITHOUT_EFFECT and (value is not None or name in _SETTABLE_TO_NONE)
    }
    tools = definitions(rest.pop("tools", ()), strict=rest.pop("strict", None))
    choice, parallel = rest.pop("tool_choice", None), rest.pop("parallel_tool_calls", True)
    if (most := rest.pop("max_completion_tokens", None)) is not None:
        rest["max_tokens"] = most
    logprobs, top = rest.pop("logprobs", None), rest.pop("top_logprobs", None)
    if top is not None and not logprobs:
        raise ConfigError("top_logprobs needs logprobs=True")
    if logprobs is not None and logprobs is not False:  # a number is the engine's own
        rest["logprobs"] = (top or 0) if logprobs is True else logprobs
    parse = None
    if (response_format := rest.pop("response_format", None)) is not None:
        if "json_schema" in rest:
            raise ConfigError(
                "response_format and json_schema both set the answer's form: omit one"
            )
        rest["json_schema"], parse = _format(response_format)
    known = [*DECODE_SETTINGS, *(each.name for each in fields(ReuseConfig))]
    check_known("keyword", rest, [*known, *_OF_CHATS], _ALSO)
    return Keywords(tools, choice, parallel, parse), rest


_OF_CHATS = (
    *("max_tokens", "timeout", "stop_sequences", "chat_template_kwargs"),
    "prompt_lookup_num_tokens",
)
_ALSO = (
    *("tools", "tool_choice", "parallel_tool_calls", "strict", "response_format"),
    *("max_completion_tokens", "top_logprobs"),
)
"""Keywords that are read above."""


def _format(given: Any) -> tuple[dict[str, Any] | None, Callable[[str], Any] | None]:
    """Return the JSON schema of a response format, and the parser of its objects."""
    match given:
        case {"type": "text"}:
            return None, None
        case {"type": "json_object"}:
            return dict(given.get("schema") or {"type": "object"}), None
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **rest}}:
            return {**schema, **({"strict": True} if rest.get("strict") else {})}, None
        case {"type": "json_schema"}:
            raise ConfigError("response_format needs {'json_schema': {'name', 'schema'}}")
    try:
        schema = json_schema_of(given)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"response_format must be OpenAI's, a class or a JSON schema, not {given!r}"
        ) from error
    if isinstance(given, type) and issubclass(given, BaseModel):
        return schema, given.model_validate_json
    return schema, None
