"""Random records for a model to copy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_FIRST = ("Agnes", "Boris", "Clara", "Daniel", "Edith", "Frank", "Greta", "Hugo", "Irene", "Jonas")
Shapes = dict[str, tuple[str, Callable[[random.Random], str]]]


def shapes(adjectives: Sequence[str], nouns: Sequence[str]) -> Shapes:
    """Return each shape's name in a sentence and its random generator; words name the places."""

    def name(draw: random.Random) -> str:
        def part() -> str:
            letters = (draw.choice(each) for each in ("bdfgklmnprstvz", "aeiou", "lnrst") * 2)
            return "".join(letters).title()

        first, second = draw.sample(_FIRST, 2)
        surname = f"{part()} {part()} {part()}-{part()}"
        return f"{first} {second} {surname} of {draw.choice(nouns).title()}ville"

    def number(draw: random.Random) -> str:
        return "-".join(f"{draw.randrange(10**4):04d}" for _ in range(5))

    def address(draw: random.Random) -> str:
        first, second, town = (draw.choice(each).title() for each in (adjectives, nouns, nouns))
        kind = draw.choice(("Street", "Road", "Lane", "Avenue"))
        house, floor, code, box = (draw.randint(10, most) for most in (999, 30, 99999, 999))
        return f"{house} {first} {second} {kind}, Floor {floor}, {code:05d} {town}ville, Box {box}"

    return {
        "name": ("owner", name),
        "number": ("account number", number),
        "address": ("postal address", address),
    }


def statement(what: str, key: str, record: str) -> str:
    """Return the sentence with a record."""
    return f"The {what} of project {key} is: {record}."


def request(what: str, key: str) -> str:
    """Return the question for a record."""
    return f"What is the {what} of project {key}? Copy it exactly, and write nothing else."
