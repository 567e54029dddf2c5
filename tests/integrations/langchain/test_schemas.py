"""What LangChain's schemas become: the model is held to all of them."""

from __future__ import annotations

import json
from typing import Annotated, Any, NotRequired, Optional, Required, TypedDict

import pytest
import typing_extensions
from langchain_core.tools import tool
from langchain_ragkv import ChatRagKV
from langchain_ragkv.tools import definitions
from pydantic import BaseModel, Field, RootModel
from schemas import Cat, Dog, Letter, Node, Open, Pets, lets_through

from ragkv import Chat
from ragkv.errors import ConfigError


class Held(BaseModel):
    """Everything that strict conversion loses."""

    counts: dict[str, int]
    letters: dict[Letter, bool]
    rows: list[dict[str, Any]]
    maybe: dict[str, bool] | None = None
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    tree: Node


class Inner(typing_extensions.TypedDict):
    counts: dict[str, int]
    next: Inner | None


class Typed(typing_extensions.TypedDict, total=False):
    """A typed dict."""

    x: Annotated[int, ..., "a number"]
    inner: Inner | None


HELD = {
    "counts": {"x": 1},
    "letters": {"a": True},
    "rows": [{"any": [1]}],
    "maybe": {"y": False},
    "pet": {"kind": "cat", "ok": True},
    "tree": {"ok": True, "kids": [{"ok": False, "kids": []}]},
}


@pytest.fixture
def llm(make_engine):
    return ChatRagKV(kv=make_engine(), max_tokens=300, temperature=1.0, seed=1)


def held_to(chain) -> dict[str, Any]:
    return chain.first.kwargs["json_schema"]


def test_dicts_unions_and_recursive_classes_keep_what_they_say(llm):
    schema = held_to(llm.with_structured_output(Held))
    assert lets_through(schema, HELD)
    Held.model_validate(HELD)
    for name, wrong in {
        "counts": {"x": "y"},
        "letters": {"c": True},
        "maybe": {"y": 1},
        "pet": {"ok": True},
        "tree": {"ok": True, "kids": [{}]},
    }.items():
        assert not lets_through(schema, {**HELD, name: wrong}), name
    for pet in ({"kind": "dog", "ok": True}, {"kind": "cat", "ok": True, "z": 1}):
        assert not lets_through(schema, {**HELD, "pet": pet})
    kid = {"ok": True, "kids": [{"ok": True, "z": 1}]}
    assert not lets_through(schema, {**HELD, "tree": kid})


@pytest.mark.parametrize("schema", [Open, Open.model_json_schema()])
def test_open_objects_stay_open(llm, schema):
    held = held_to(llm.with_structured_output(schema))
    assert lets_through(held, {"ok": True, "more": [1]})
    assert not lets_through(held, {"ok": 1})


class OldInner(TypedDict):  # as on every Python, from typing itself
    counts: dict[str, int]
    next: Annotated[dict[str, Any] | None, "what follows"]


class Old(TypedDict):
    x: NotRequired[Annotated[int, ..., "a number"]]
    inner: NotRequired[Optional[OldInner]]  # noqa: UP045
    rows: Required[list[OldInner]]


def test_typed_dicts_of_typing(llm):
    held = held_to(llm.with_structured_output(Old))
    row = {"counts": {"a": 1}, "next": None}
    assert lets_through(held, {"rows": [row, {"counts": {}, "next": {"any": [1]}}]})
    assert lets_through(held, {"x": 1, "inner": None, "rows": []})
    assert lets_through(held, {"inner": row, "rows": []})
    for wrong in ({}, {"rows": [{}]}, {"rows": [], "z": 1}, {"rows": [], "inner": {**row, "z": 1}}):
        assert not lets_through(held, wrong)


def test_typed_dicts(llm):
    held = held_to(llm.with_structured_output(Typed))
    deep = {"counts": {"a": 1}, "next": {"counts": {}, "next": None}}
    assert lets_through(held, {"x": 1, "inner": deep})
    assert lets_through(held, {"inner": None})
    assert not lets_through(held, {"inner": {"counts": {"a": "b"}, "next": None}})
    assert not lets_through(held, {"z": 1})


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_objects_of_a_class(llm, method):
    found = llm.with_structured_output(Pets, method=method).invoke("Who?")
    assert isinstance(found, Pets)


@pytest.mark.parametrize("title", [{}, {"title": "Talk", "description": "who says what"}])
def test_lists(llm, title):
    schema = {**title, "type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
    found = llm.with_structured_output(schema).invoke("Who?")
    assert isinstance(found, list)
    raw = llm.with_structured_output(schema, include_raw=True).invoke("Who?")
    assert json.loads(raw["raw"].content) == raw["parsed"]
    for method in ("json_mode", "function_calling"):
        with pytest.raises(ConfigError, match="array"):
            llm.with_structured_output(schema, method=method)


def test_a_class_of_a_list(llm):
    class Flags(RootModel[list[bool]]):
        root: list[bool] = Field(min_length=1, max_length=2)

    assert isinstance(llm.with_structured_output(Flags).invoke("Who?"), Flags)
    with pytest.raises(ConfigError, match="array"):
        llm.with_structured_output(Flags, method="function_calling")


@pytest.mark.parametrize("schema", [{"properties": {"ok": {"type": "boolean"}}}, {"enum": ["a"]}])
def test_schemas_without_a_title(llm, schema):
    assert llm.with_structured_output(schema).invoke("Who?") is not None


def test_strict_refuses_what_cannot_be_enforced(llm):
    schema = {"title": "T", "type": "array", "items": {"type": "null"}, "uniqueItems": True}
    llm.with_structured_output({**schema, "maxItems": 1}).invoke("Who?")
    with pytest.raises(ConfigError, match="uniqueItems"):
        llm.with_structured_output(schema, strict=True).invoke("Who?")


def test_tools_of_recursive_classes():
    @tool(args_schema=Node)
    def plant(ok: bool, kids: list[Node]) -> str:
        """Plant a tree."""
        return f"{ok}{kids}"

    for given in (Node, plant):
        (definition,) = definitions([given])
        schema = Chat([], [definition], "any").forced_schema
        name = definition["function"]["name"]
        kid = {"ok": True, "kids": []}
        assert lets_through(schema, {"name": name, "arguments": {"ok": True, "kids": [kid]}})
        assert not lets_through(schema, {"name": name, "arguments": {"ok": True, "kids": [1]}})


def test_response_formats_of_recursive_classes(llm):
    found = llm.bind(response_format=Pets).invoke("Who?")
    assert isinstance(found.additional_kwargs["parsed"], Pets)
