"""Structured output: a runnable whose answers are objects of a schema."""

from __future__ import annotations

import json
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

from langchain_ragkv.tools import cut_off
from ragkv.errors import ConfigError


class WholeJson(JsonOutputParser):
    """Refuses JSON that was cut off (``max_tokens``), which LangChain's parsers complete."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return the object; of a stream's parts, as much as is there."""
        why, text = cut_off(getattr(result[0], "message", None)), result[0].text
        if why or not partial:
            try:
                json.loads(text)
            except ValueError as error:
                said = str(why or f"the answer is no JSON ({error})")
                raise OutputParserException(said, llm_output=text) from error
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
        return _ANY_OBJECT if schema is None else convert_to_json_schema(schema)
    except (ValueError, TypeError, RecursionError):
        return json_schema_of(schema)


def _with_typed_dicts(hint: Any) -> Any:
    """Return a type with typing_extensions' TypedDicts, for pydantic before Python 3.12."""
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


_ANY_OBJECT = {"type": "object"}
_METHODS = ("json_schema", "function_calling", "json_mode")


def structured(
    model: Any, schema: Any, method: str, settings: dict[str, Any], *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """Return the chain of model and parser for ``with_structured_output``.

    Raises
    ------
    ConfigError
        The method is unknown, it gives objects and the schema is of a different type, or
        ``settings`` have tools beside the schema's own.
    """
    if method not in _METHODS:
        raise ConfigError(f"method must be {', '.join(_METHODS)}, not {method!r}")
    required = _ANY_OBJECT if schema is None else json_schema_of(schema)
    if method != "json_schema" and required.get("type", "object") != "object":
        raise ConfigError(f"{method} gives objects: use json_schema for type {required['type']!r}")
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: Any
    if method == "function_calling":
        if own := {"tools", "tool_choice"} & settings.keys():
            raise ConfigError(
                f"function_calling has a tool of its own: omit {', '.join(sorted(own))}, or use "
                "method='json_schema'"
            )
        form = {"kwargs": {"method": method}, "schema": schema}
        settings = {"tool_choice": "any", "ls_structured_output_format": form, **settings}
        llm = model.bind_tools([schema], **settings)
        parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
        if not is_class:
            name = convert_to_openai_tool(schema)["function"]["name"]
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        parser = RunnableLambda(_with_call) | parser
    else:
        held = _ANY_OBJECT if method == "json_mode" else required
        strict = {"strict": True} if settings.get("strict") else {}
        form = {"kwargs": {"method": method}, "schema": _traced(schema)}
        settings = {name: settings[name] for name in settings if name != "strict"}
        llm = model.bind(
            json_schema={**held, **strict}, ls_structured_output_format=form, **settings
        )
        parser = WholeObject(pydantic_object=schema) if is_class else WholeJson()
    if not include_raw:
        return llm | parser  # type: ignore[no-any-return]
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _with_call(message: AIMessage) -> AIMessage:
    if not message.tool_calls:
        text = "".join(call["args"] or "" for call in message.invalid_tool_calls)
        said = str(cut_off(message) or "the answer is no call of the tool")
        raise OutputParserException(said, llm_output=text)
    return message
