"""Aggregation: what no single chunk has. Frequent words, badges of a team, their number.

Source: RULER, arXiv 2404.06654, section 3: ``common`` and ``frequent`` words, fewer of each.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence
from functools import partial

from ragkv_bench.data.needles import Hidden, Hide, draw_keys

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_OTHERS = 1000
"""Words that each occur once in lists of so many, before they begin again."""


def _common(draw: random.Random) -> Hidden:
    return _lists(draw, draw_keys(draw, _OTHERS), (15,) * 5)


def _frequent(draw: random.Random) -> Hidden:
    coded = ["".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(_OTHERS)]
    return _lists(draw, coded, (30, 20, 15))


def _lists(draw: random.Random, words: Sequence[str], times: Sequence[int]) -> Hidden:
    answers = tuple(words[: len(times)])
    needles = [
        (word, True) for word, count in zip(answers, times, strict=True) for _ in range(count)
    ]
    draw.shuffle(needles)
    number = _NUMBERS[len(times)]
    question = f"These lists repeat {number} words many times. Write these {number} words."
    return Hidden("words", tuple(needles), question, answers, tuple(words[len(times) :]))


def _badges(task: str, draw: random.Random) -> Hidden:
    own, other = draw_keys(draw, 2)
    count = draw.randint(2, 6)
    badges = [str(number) for number in draw.sample(range(10**4, 10**5), count + 3)]
    teams = [own] * count + [other] * 3
    needles = [
        (f"One of the badges of team {team} is: {badge}.", team == own)
        for team, badge in zip(teams, badges, strict=True)
    ]
    draw.shuffle(needles)
    if task == "count":
        question = f"How many badges of team {own} are in the documents? Answer with a number."
        return Hidden(task, tuple(needles), question, (str(count),))
    question = f"What are all the badges of team {own} in the documents?"
    return Hidden(task, tuple(needles), question, tuple(badges[:count]))


KINDS: dict[str, Hide] = {
    "common": _common,
    "frequent": _frequent,
    "list": partial(_badges, "words"),
    "count": partial(_badges, "count"),
}


def counts(answer: str, expected: str) -> bool:
    """Whether the first number of an answer, in digits or as a word, is the expected one."""
    found = re.search(rf"\d+|\b({'|'.join(_NUMBERS)})\b", answer.lower())
    number = found and (str(_NUMBERS.index(found[1])) if found[1] else found[0])
    return number == expected
