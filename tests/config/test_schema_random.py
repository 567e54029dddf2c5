"""Random schemas of objects, beside a validator that is written from the rule alone."""

import random
from itertools import combinations, product
from typing import Any

import pytest
from schemas import ignored, lets_through

NAMES = "abcd"
VALUES = (None, True, 1)
OTHERS = {"additionalProperties", "unevaluatedProperties"}


def drawn(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Draw a schema of an object with few properties, whose parts may be inherited."""
    names = rng.sample(NAMES, rng.randint(0, 2))
    schema: dict[str, Any] = {"properties": {name: value_schema(rng) for name in names}}
    schema["required"] = rng.sample(NAMES, rng.choice([0, 0, 1]))
    if rng.random() < 0.15:
        schema["additionalProperties"] = value_schema(rng)
    if depth < 2:
        keyword = rng.choice(["allOf", "anyOf", "$ref", "none", "none"])
        if keyword in {"allOf", "anyOf"}:
            schema[keyword] = [drawn(rng, depth + 1) for _ in range(rng.randint(1, 2))]
        elif keyword == "$ref":
            schema["$ref"] = f"#/$defs/{rng.choice('xy')}"
    items = list(schema.items())
    rng.shuffle(items)
    return dict(items)


def value_schema(rng: random.Random) -> Any:
    return rng.choice([True, {"type": "null"}, {"type": ["null", "boolean"]}, {"const": 1}])


def choices(schema: Any, defined: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the parts that a value follows, for each way to choose branches."""
    found: list[list[dict[str, Any]]] = [[schema]]
    together = [*schema.get("allOf", ())]
    if "$ref" in schema:
        together.append(defined[schema["$ref"].rpartition("/")[2]])
    for each in together:
        found = [a + b for a, b in product(found, choices(each, defined))]
    if "anyOf" in schema:
        inner = [parts for branch in schema["anyOf"] for parts in choices(branch, defined)]
        found = [a + b for a, b in product(found, inner)]
    return found


def follows(value: Any, schema: Any) -> bool:
    if schema is True or "const" in schema:
        return schema is True or (value == 1 and value is not True)
    kinds = {"null": value is None, "boolean": isinstance(value, bool)}
    given = schema["type"]
    return any(kinds[each] for each in ([given] if isinstance(given, str) else given))


def is_valid(instance: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Whether some choice of branches holds, and names all properties or speaks of others."""
    for parts in choices(schema, schema["$defs"]):
        named = {name for part in parts for name in (*part["properties"], *part["required"])}
        speaks = any("additionalProperties" in part for part in parts)
        if (speaks or named >= instance.keys()) and all(
            set(part["required"]) <= instance.keys()
            and all(
                follows(value, part["properties"].get(name, part.get("additionalProperties", True)))
                for name, value in instance.items()
            )
            for part in parts
        ):
            return True
    return False


def compare(count: int, seed: int) -> None:
    rng = random.Random(seed)
    instances = [
        dict(zip(names, values, strict=True))
        for size in range(3)
        for names in combinations((*NAMES, "z"), size)
        for values in product(VALUES, repeat=size)
    ]
    for _ in range(count):
        schema = {**drawn(rng), "type": "object"}
        schema["$defs"] = {name: drawn(rng, 2) for name in "xy"}
        assert ignored(schema) == []
        for instance in rng.sample(instances, 12):
            written = lets_through(schema, instance)
            assert written == is_valid(instance, schema), (schema, instance)


def test_random_objects():
    compare(60, seed=1)


@pytest.mark.slow
def test_2000_random_objects():
    compare(2000, seed=2)
