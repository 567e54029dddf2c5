"""Answers follow a JSON schema, whatever the model would rather say."""

import json
import random
import string
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tiny import ask, some_chunks, tiny_tokenizer
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from ragkv import Chat, DecodeConfig
from ragkv.config import json_schema
from ragkv.decode.constraint import SchemaConstraint
from ragkv.errors import ConfigError, MissingDependencyError

CHUNKS = some_chunks(2)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"page": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["page"],
            "additionalProperties": False,
        },
    },
}
REST = {"type": "function", "function": {"name": "rest"}}


def drawn_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:  # noqa: PLR0911  a case each
    """Draw a schema whose values are short."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const"]
    kind = rng.choice([*kinds, *["object", "array", "any"] * (depth < 2)]) if depth else "object"
    match kind:
        case "object":
            names = rng.sample(["a", "name", "the key", "x_1", 'quo"te', "ключ"], rng.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: drawn_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            least = rng.randint(0, 2)
            items = {"minItems": least, "maxItems": least + rng.randint(0, 2)}
            return {"type": "array", "items": drawn_schema(rng, depth + 1), **items}
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}
        case "integer":
            least = rng.randint(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 500)}
        case "enum":
            return {"enum": rng.sample(["red", "green", 3, True, None, "b\\n"], 3)}
        case "const":
            return {"const": "".join(rng.choices(string.printable, k=4))}
        case "any":
            return {"anyOf": [drawn_schema(rng, depth + 1) for _ in range(2)]}
    return {"type": kind}


def follows(value: Any, schema: dict[str, Any]) -> bool:  # noqa: PLR0911  a keyword each
    """Whether a value is valid, by the keywords that are drawn."""
    if "anyOf" in schema:
        return any(follows(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    if "const" in schema:
        return value == schema["const"]
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= value.keys() <= known.keys()
                and all(follows(value[name], known[name]) for name in value)
            )
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(follows(each, schema["items"]) for each in value)
            )
        case "string":
            return (
                isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
            )
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
    return value is None


def assert_schemas_are_followed(engine, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(count):
        schema = drawn_schema(rng)
        answer = engine.generate(
            "Say it:", max_new_tokens=600, json_schema=schema, temperature=1.0, seed=number
        )
        assert answer.finish_reason == "stop", (schema, answer.text)
        assert follows(json.loads(answer.text), schema), (schema, answer.text)


def test_random_schemas(make_engine):
    assert_schemas_are_followed(make_engine(layers=2), 30, seed=1)


@pytest.mark.slow
def test_500_random_schemas(make_engine):
    assert_schemas_are_followed(make_engine(layers=2), 500, seed=2)


@pytest.mark.parametrize("method", ["query", "full"])
def test_greedy_answers_of_every_loop(make_engine, method):
    engine = make_engine()
    engine.precompute(CHUNKS)
    given = {"json_schema": PERSON, "method": method}
    answer = engine.generate(ask(CHUNKS), max_new_tokens=200, **given)
    assert answer.finish_reason == "stop"
    assert answer.text == json.dumps(json.loads(answer.text), ensure_ascii=False)
    assert json.loads(answer.text).keys() == {"name", "age", "kind"}


def test_drafts_change_nothing(make_engine):
    engine = make_engine()
    asked = ask([json.dumps({"name": "Tom", "age": 3, "kind": "cat"}), *CHUNKS])
    given = {"json_schema": PERSON, "max_new_tokens": 200}
    alone = engine.generate(asked, drafts=False, **given)
    drafted = engine.generate(asked, **given)
    assert drafted.report.decode.drafted > 0
    assert drafted.token_ids == alone.token_ids


def test_answers_beside_each_other(make_engine):
    """Constrained and free ones, in the same steps."""
    engine = make_engine()
    calls = [
        {"json_schema": PERSON, "max_new_tokens": 200},
        {"max_new_tokens": 40, "ignore_eos": True},
        {"json_schema": {"enum": ["yes", "no"]}, "max_new_tokens": 20},
    ]
    alone = [engine.generate(ask(CHUNKS), **given).token_ids for given in calls]
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(engine.generate, ask(CHUNKS), **given) for given in calls]
        assert [future.result().token_ids for future in futures] == alone


def test_tokens_of_bytes_are_read_as_such():
    """As transformers loads Llama 3's GGUF files, with decoders of two kinds."""
    raw = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " ")]
    parts += [decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    begun = tokenizer('{"a":')["input_ids"]
    constraint = SchemaConstraint(
        {"type": "object"}, tokenizer, vocabulary=len(tokenizer), ends=(), begin=0
    )
    scores = constraint(torch.tensor([begun]), torch.zeros(1, len(tokenizer)))
    allowed = tokenizer.convert_ids_to_tokens((scores[0] == 0).nonzero().flatten().tolist())
    assert "\u0120" in allowed
    assert all(token.startswith("\u0120") for token in allowed)


@pytest.mark.parametrize(
    "schema",
    [5, "object", {"type": "nonsense"}, {"$ref": "#/nowhere"}, {"not": {}}, {"enum": [object()]}],
)
def test_what_is_no_schema(schema):
    with pytest.raises(ConfigError, match="json_schema"):
        DecodeConfig(json_schema=schema)


def test_without_the_extra(monkeypatch):
    absent = lambda name: None if name == "llguidance" else find_spec(name)  # noqa: E731
    monkeypatch.setattr(json_schema, "find_spec", absent)
    with pytest.raises(MissingDependencyError, match=r"pip install '.*\[structured\]'"):
        DecodeConfig(json_schema=PERSON)


# ---- one call by construction


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("choice", ["any", "look", "rest"])
def test_a_call_that_is_asked_for(make_engine, choice, streaming):
    engine = make_engine()
    chat = Chat(ask(CHUNKS), [LOOK, REST], choice)
    given = {"max_new_tokens": 60, "temperature": 1.0, "seed": 3}
    if streaming:
        stream = engine.stream(chat, **given)
        assert "".join(stream) == ""
        answer = stream.completion
    else:
        answer = engine.generate(chat, **given)
    (call,) = answer.tool_calls
    assert (answer.text, answer.invalid_tool_calls) == ("", ())
    assert call.name in (("look", "rest") if choice == "any" else (choice,))
    if call.name == "look":
        assert 1 <= call.arguments["page"] <= 99


def test_tools_that_are_wrong(make_engine):
    for tools, choice in (([{"name": "look"}], "auto"), ([LOOK], "jump"), ([], "any")):
        with pytest.raises(ConfigError, match="tool"):
            Chat(ask(CHUNKS), tools, choice)
    with pytest.raises(ConfigError, match="json_schema"):
        make_engine().generate(Chat(ask(CHUNKS), [LOOK], "any"), json_schema=PERSON)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_calls_in_a_free_answer(choice, make_engine, make_say):
    said = 'Wait.\n<tool_call>\n{"name": "look", "arguments": {"page": 7}}\n</tool_call>'
    engine = make_engine()
    make_say(engine, said)
    stream = engine.stream(Chat(ask(CHUNKS), [LOOK], choice), max_new_tokens=200)
    pieces = "".join(stream)
    answer = stream.completion
    assert answer.text == pieces
    if choice == "none":
        assert (answer.text, answer.tool_calls) == (said, ())
    else:
        assert answer.text == "Wait."
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [
            ("look", {"page": 7})
        ]
