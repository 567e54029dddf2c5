"""Structured output: a runnable whose answers are objects of a schema."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from ragkv.errors import ConfigError

Bind = Callable[..., Runnable[LanguageModelInput, Any]]
ANY_OBJECT = {"type": "object"}


def following(
    bind: Bind, schema: Any, *, method: str, include_raw: bool
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
    """
    if method not in ("json_schema", "json_mode"):
        raise ConfigError(
            f"method must be json_schema, function_calling or json_mode, not {method!r}"
        )
    wanted = convert_to_json_schema(schema, strict=True) if schema is not None else ANY_OBJECT
    llm = bind(
        json_schema=wanted if method == "json_schema" else ANY_OBJECT,
        ls_structured_output_format={"kwargs": {"method": method}, "schema": wanted},
    )
    parser: Any = JsonOutputParser()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = PydanticOutputParser(pydantic_object=schema)
    if not include_raw:
        chain: Runnable[LanguageModelInput, Any] = llm | parser
        return chain
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
