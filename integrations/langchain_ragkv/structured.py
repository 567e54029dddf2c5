"""Structured output: a runnable whose answers are objects of a schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import itemgetter
from types import UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import TypeAdapter
from typing_extensions import TypedDict, is_typeddict

from ragkv.errors import ConfigError


class WholeJson(JsonOutputParser):
    """Refuses JSON that was cut short (``max_tokens``), which LangChain's parsers complete."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return the object; of a stream's parts, as much as is there."""
        if not partial:
            try:
                json.loads(result[0].text)
            except ValueError as error:
                text = result[0].text
                raise OutputParserException(
                    f"the answer is no whole JSON ({error}): is max_tokens too small?",
                    llm_output=text,
                ) from error
        return super().parse_result(result, partial=partial)


class WholeObject(WholeJson, PydanticOutputParser[Any]):
    """Makes the object of the pydantic class, too."""


def json_schema_of(schema: Any) -> dict[str, Any]:
    """Return the JSON schema of a class, a TypedDict, a tool's definition, or a JSON schema."""
    if isinstance(schema, dict) and not {"function", "parameters", "input_schema"} & schema.keys():
        return schema
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        model: Any = schema
        made: dict[str, Any] = (
            model.model_json_schema() if hasattr(model, "model_json_schema") else model.schema()
        )
        return made
    if is_typeddict(schema):
        return TypeAdapter(_with_typed_dicts(schema)).json_schema()
    return convert_to_json_schema(schema)


def _traced(schema: Any) -> dict[str, Any]:
    """Return a schema as LangChain's traces have it, where LangChain can write it."""
    try:
        return ANY_OBJECT if schema is None else convert_to_json_schema(schema)
    except (ValueError, TypeError, RecursionError):
        return json_schema_of(schema)


def _with_typed_dicts(hint: Any) -> Any:
    """Return a type with typing_extensions' TypedDicts: pydantic wants them before Python 3.12."""
    if is_typeddict(hint):
        if type(hint).__module__ != "typing":
            return hint
        fields = {}
        for name, inner in get_type_hints(hint, include_extras=True).items():
            said = get_origin(inner)  # postponed annotations hide it from __required_keys__
            bare = get_args(inner)[0] if said in {Required, NotRequired} else inner
            must = said is not NotRequired and (said is Required or name in hint.__required_keys__)
            fields[name] = (Required if must else NotRequired)[_with_typed_dicts(bare)]
        return TypedDict(hint.__name__, fields)  # type: ignore[operator]
    origin, inner = get_origin(hint), tuple(map(_with_typed_dicts, get_args(hint)))
    if origin in {None, Literal} or inner == get_args(hint):
        return hint
    return Union[inner] if origin is UnionType else origin[inner]  # noqa: UP007  at run time


def check_is_object(schema: dict[str, Any], method: str) -> None:
    """Check a schema of what can be an object alone.

    Raises
    ------
    ConfigError
        It is one of lists, or of other values.
    """
    if schema.get("type", "object") != "object":
        raise ConfigError(f"{method} gives objects: use json_schema for type {schema['type']!r}")


Bind = Callable[..., Runnable[LanguageModelInput, Any]]
ANY_OBJECT = {"type": "object"}


def following(
    bind: Bind, schema: Any, *, method: str, include_raw: bool, strict: bool = False
) -> Runnable[LanguageModelInput, Any]:
    """Return a chain of the model, held to the schema, and the parser of its answers.

    Parameters
    ----------
    bind
        The model's ``bind``.
    schema
        A pydantic class, whose objects come out; or a TypedDict or JSON schema: dicts come out.
    method
        ``"json_schema"``, or ``"json_mode"``: any JSON object.
    include_raw
        Whether the outcome is ``{"raw", "parsed", "parsing_error"}``.
    strict
        Whether a schema with keywords that cannot be enforced is refused.
    """
    if method not in ("json_schema", "json_mode"):
        raise ConfigError(
            f"method must be json_schema, function_calling or json_mode, not {method!r}"
        )
    wanted = ANY_OBJECT if schema is None else json_schema_of(schema)
    if method == "json_mode":
        check_is_object(wanted, method)
        wanted = ANY_OBJECT
    llm = bind(
        json_schema={**wanted, "strict": True} if strict else wanted,
        ls_structured_output_format={"kwargs": {"method": method}, "schema": _traced(schema)},
    )
    parser: Any = WholeJson()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = WholeObject(pydantic_object=schema)
    return _chain(llm, parser, include_raw=include_raw)


def calling(
    bind_tools: Bind, schema: Any, *, include_raw: bool, **kwargs: Any
) -> Runnable[LanguageModelInput, Any]:
    """Return a chain of the model, which has to call the schema as a tool, and the parser.

    Parameters
    ----------
    bind_tools
        The model's ``bind_tools``; it takes ``kwargs``.
    schema, include_raw
        As in :func:`following`.

    Raises
    ------
    ConfigError
        The schema is not of objects, or ``kwargs`` have tools of their own.
    """
    check_is_object(json_schema_of(schema), "function_calling")
    if own := {"tools", "tool_choice"} & kwargs.keys():
        raise ConfigError(
            f"function_calling has a tool of its own: omit {', '.join(sorted(own))}, or use "
            "method='json_schema'"
        )
    form = {"kwargs": {"method": "function_calling"}, "schema": schema}
    llm = bind_tools([schema], tool_choice="any", ls_structured_output_format=form, **kwargs)
    parser: Any = PydanticToolsParser(tools=[schema], first_tool_only=True)
    if not (isinstance(schema, type) and is_basemodel_subclass(schema)):
        name = convert_to_openai_tool(schema)["function"]["name"]
        parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return _chain(llm, RunnableLambda(_with_call) | parser, include_raw=include_raw)


def _with_call(message: AIMessage) -> AIMessage:
    if not message.tool_calls:
        text = "".join(call["args"] or "" for call in message.invalid_tool_calls)
        raise OutputParserException(
            "the answer is no whole call: is max_tokens too small?", llm_output=text
        )
    return message


def _chain(
    llm: Runnable[LanguageModelInput, Any], parser: Any, *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    if not include_raw:
        chain: Runnable[LanguageModelInput, Any] = llm | parser
        return chain
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
