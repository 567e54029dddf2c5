"""Schemas of tools and answers, as openai's package and instructor send them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from openai.lib._parsing._completions import type_to_response_format_param
from pydantic import BaseModel, Field

ASKED = [{"role": "user", "content": "Where?"}]


class Kind(Enum):
    A = "a"
    B = "b"


class Inner(BaseModel):
    kind: Kind
    ok: bool


class Cat(BaseModel):
    species: Literal["cat"] = "cat"
    ok: bool


class Dog(BaseModel):
    species: Literal["dog"]
    kind: Kind


class Person(BaseModel):
    inner: Inner
    kinds: list[Kind] = Field(max_length=2)
    pet: Cat | Dog = Field(discriminator="species")
    maybe: Inner | None = None


class Place(BaseModel):
    """Finds a place."""

    kind: Kind
    inner: Inner


class Saved(BaseModel):
    file: Path


@pytest.fixture
def client(listen, make_engine):
    return OpenAI(
        base_url=f"{listen(make_engine()).url}/v1", api_key="none", max_retries=0, timeout=60
    )


def ask_for(client, **given):
    return client.chat.completions.create(
        model="default", **{"messages": ASKED, "max_tokens": 200, **given}
    ).choices[0]


def form_of(schema, **given):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **given}}


@pytest.mark.parametrize(
    "form",
    [
        form_of(Person.model_json_schema()),
        form_of(Person.model_json_schema(), strict=True),
        form_of(Person.model_json_schema(), strict=False),
        {"type": "json_object", "schema": Person.model_json_schema()},
    ],
)
def test_a_plain_schema_ends_the_answer(client, form):
    """As instructor sends it: nothing says that objects are closed."""
    answer = ask_for(client, response_format=form, temperature=1.0, seed=1)
    assert answer.finish_reason == "stop"
    Person.model_validate_json(answer.message.content)


def test_the_package_parses_answers(client):
    answer = client.chat.completions.parse(
        model="default", messages=ASKED, response_format=Place, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Place)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "Place"}}]
)
def test_tools_of_classes_with_enums(client, choice):
    tools = [pydantic_function_tool(Place), pydantic_function_tool(Inner)]
    answer = ask_for(client, tools=tools, tool_choice=choice)
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert (call.type, answer.message.content) == ("function", None)
    kind = {"Place": Place, "Inner": Inner}[call.function.name]
    kind.model_validate_json(call.function.arguments)


def test_a_call_that_has_to_be_made_goes_before_the_answers_form(client):
    tools = [pydantic_function_tool(Place)]
    answer = ask_for(
        client, tools=tools, tool_choice="required", response_format=form_of({"type": "null"})
    )
    assert answer.finish_reason == "tool_calls"
    Place.model_validate_json(answer.message.tool_calls[0].function.arguments)


def test_what_cannot_be_enforced(client):
    schema = Saved.model_json_schema()
    answer = ask_for(client, response_format=form_of(schema), max_tokens=9)
    assert answer.message.content.startswith('{"file": "')
    tool = {"type": "function", "function": {"name": "save", "parameters": schema}}
    for strict in (None, False):
        tool["function"]["strict"] = strict
        ask_for(client, tools=[tool], tool_choice="required", max_tokens=9)
    tool["function"]["strict"] = True
    ask_for(client, tools=[tool], max_tokens=9)  # a free answer, which nothing is promised of


@pytest.mark.parametrize(
    ("given", "param", "named"),
    [
        ({"response_format": type_to_response_format_param(Saved)}, "response_format", ["file"]),
        (
            {"response_format": form_of({"items": {"uniqueItems": True}}, strict=True)},
            "response_format",
            ["[]", "uniqueItems"],
        ),
        (
            {"tools": [pydantic_function_tool(Saved)], "tool_choice": "required"},
            "tools",
            ["Saved", "file", "path"],
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "t", "parameters": {"$ref": "#/x"}}}
                ],
                "tool_choice": "required",
            },
            "tools",
            ["#/x"],
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "t", "parameters": "none"}}]},
            "tools",
            ["'t'"],
        ),
        ({"response_format": form_of({"enum": []})}, "response_format", []),
    ],
)
def test_a_schema_that_is_refused_names_its_field(client, given, param, named):
    with pytest.raises(BadRequestError) as error:
        ask_for(client, **given)
    assert error.value.param == param
    assert all(each in str(error.value) for each in named)
