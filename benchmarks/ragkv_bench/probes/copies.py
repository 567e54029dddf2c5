"""Copies: one record, to be given back verbatim, among records of the same shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from ragkv_bench.data.needle_words import ADJECTIVES, NOUNS
from ragkv_bench.data.needles import Hidden, Hide, draw_keys

_FIRST = ("Agnes", "Boris", "Clara", "Daniel", "Edith", "Frank", "Greta", "Hugo", "Irene", "Jonas")
RECORDS = 3
"""Records in a prompt, the one that is asked for among them."""


def _name(draw: random.Random) -> str:
    def part() -> str:
        letters = (draw.choice(each) for each in ("bdfgklmnprstvz", "aeiou", "lnrst") * 2)
        return "".join(letters).title()

    first, second = draw.sample(_FIRST, 2)
    return (
        f"{first} {second} {part()} {part()} {part()}-{part()} of {draw.choice(NOUNS).title()}ville"
    )


def _number(draw: random.Random) -> str:
    return "-".join(f"{draw.randrange(10**4):04d}" for _ in range(5))


def _address(draw: random.Random) -> str:
    first, second, town = (draw.choice(each).title() for each in (ADJECTIVES, NOUNS, NOUNS))
    kind = draw.choice(("Street", "Road", "Lane", "Avenue"))
    house, floor, code, box = (draw.randint(10, most) for most in (999, 30, 99999, 999))
    return f"{house} {first} {second} {kind}, Floor {floor}, {code:05d} {town}ville, Box {box}"


def _code(draw: random.Random) -> str:
    verb, noun, host = (draw.choice(each) for each in (("load", "open", "send"), NOUNS, NOUNS))
    port, seconds, retries = (draw.randint(2, most) for most in (9999, 99, 9))
    return f"curl https://{host}.example.org:{port}/{verb}/{noun}?t={seconds} --retry {retries}"


_SHAPES: dict[str, tuple[str, Callable[[random.Random], str]]] = {
    "name": ("owner", _name),
    "number": ("account number", _number),
    "address": ("postal address", _address),
    "code": ("download command", _code),
}


def _hide(shape: str, draw: random.Random) -> Hidden:
    what, value = _SHAPES[shape]
    records = {key: value(draw) for key in draw_keys(draw, RECORDS)}
    asked = next(iter(records))
    needles = [
        (f"The {what} of project {key} is: {record}.", key == asked)
        for key, record in records.items()
    ]
    draw.shuffle(needles)
    question = f"What is the {what} of project {asked}? Copy it exactly, and write nothing else."
    return Hidden("copy", tuple(needles), question, (records[asked],))


KINDS: dict[str, Hide] = {shape: partial(_hide, shape) for shape in _SHAPES}


def is_copied(answer: str, expected: str) -> bool:
    """Whether an answer has the expected text, letter by letter, white space aside."""
    return " ".join(expected.split()) in " ".join(answer.split())
