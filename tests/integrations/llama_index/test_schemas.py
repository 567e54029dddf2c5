"""What LlamaIndex's classes become: the model is held to all of them."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.ragkv import RagKVLLM
from llama_index.llms.ragkv.tools import definition
from pydantic import (
    AnyUrl,
    Base64Bytes,
    BaseModel,
    IPvAnyAddress,
    SecretStr,
    create_model,
)
from schemas import Cat, Letter, Node, Open, Pets, lets_through

from ragkv import Chat

ASK = PromptTemplate("Who?")


class Place(BaseModel):
    letter: Letter
    inner: Cat


@pytest.fixture
def llm(make_engine):
    return RagKVLLM(kv=make_engine(), is_chat_model=True, max_new_tokens=400, context_window=4000)


def test_objects_of_a_class(llm):
    found = llm.structured_predict(Pets, ASK, {"temperature": 1.0, "seed": 1})
    assert isinstance(found, Pets)
    *_, last = llm.stream_structured_predict(Pets, ASK, {"temperature": 1.0, "seed": 1})
    assert last == found


def test_a_function_with_a_nested_class(llm):
    tool = FunctionTool.from_defaults(
        lambda letter, inner: f"{letter}{inner}", name="place", fn_schema=Place
    )
    found = llm.predict_and_call([tool], "Where?", tool_required=True)
    assert found.response.startswith(("a", "b"))


def test_tools_of_several_classes(llm):
    tools = [
        FunctionTool.from_defaults(lambda **given: str(given), name=name, fn_schema=kind)
        for name, kind in (("pets", Pets), ("place", Place), ("tree", Node))
    ]
    response = llm.chat_with_tools(tools, "Where?", tool_required=True, temperature=1.0, seed=1)
    (call,) = llm.get_tool_calls_from_response(response)
    kind = {"pets": Pets, "place": Place, "tree": Node}[call.tool_name]
    kind.model_validate(call.tool_kwargs)


def test_a_class_of_a_tool_that_contains_itself_holds():
    tool = FunctionTool.from_defaults(lambda **given: str(given), name="t", fn_schema=Node)
    schema = Chat([], [definition(tool)], "any").forced_schema
    assert lets_through(schema, {"name": "t", "arguments": {"ok": True, "kids": [{"ok": False}]}})
    assert not lets_through(schema, {"name": "t", "arguments": {}})


def test_an_open_class_of_a_tool_stays_open():
    tool = FunctionTool.from_defaults(lambda **given: str(given), name="t", fn_schema=Open)
    schema = Chat([], [definition(tool)], "any").forced_schema
    assert lets_through(schema, {"name": "t", "arguments": {"ok": True, "more": 1}})
    assert not lets_through(schema, {"name": "t", "arguments": {"ok": 1}})


UTC = dt.UTC
VALUES: dict[Any, Any] = {
    Path: Path("a/b"),
    SecretStr: SecretStr("x"),
    bytes: b"x",
    Base64Bytes: b"QUJD",
    Decimal: Decimal("-1.50"),
    dt.date: dt.date(2024, 2, 29),
    dt.time: dt.time(8, 30, tzinfo=UTC),
    dt.datetime: dt.datetime(2024, 2, 29, 8, 30, 1, 250, tzinfo=UTC),
    dt.timedelta: dt.timedelta(hours=26, minutes=1, seconds=3),
    uuid.UUID: uuid.uuid4(),
    AnyUrl: AnyUrl("http://a.b/c?d"),
    IPvAnyAddress: IPv6Address("fe80::1"),
    IPv4Address: IPv4Address("127.0.0.1"),
    set[int]: {1},
    frozenset[Letter]: frozenset({"a"}),
    dict[Letter, int]: {"a": 1},
    dict[uuid.UUID, bool]: {uuid.uuid4(): True},
    dict[dt.date, bool]: {dt.date(2024, 2, 29): True},
    dict[int, bool]: {3: True},
    tuple[int, Letter]: (1, "b"),
    Letter | None: None,
    list[dict[str, Cat]]: [{"x": Cat(ok=True)}],
    Any: {"x": [1, None]},
}


@pytest.mark.parametrize("kind", VALUES)
def test_what_pydantic_writes_may_be_written(kind):
    made = create_model("Made", value=(kind, ...))
    written = json.loads(made(value=VALUES[kind]).model_dump_json())
    assert lets_through(made.model_json_schema(), written)
    assert not lets_through(made.model_json_schema(), {**written, "other": 1})
    assert not lets_through(made.model_json_schema(), {})
