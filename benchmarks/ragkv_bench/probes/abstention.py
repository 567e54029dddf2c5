"""Abstention: questions whose passage is not among the chunks."""

from __future__ import annotations

import random

from ragkv.errors import ConfigError
from ragkv_bench.data.examples import DataSet, Example
from ragkv_bench.data.needles import Hidden, Hide, draw_keys

MISSING = "not in the documents"
PHRASES = (
    MISSING,
    "not in the document",
    "not in the text",
    "not in the passage",
    "not mention",
    "not provide",
    "not state",
    "not specif",
    "not given",
    "not found",
    "not available",
    "not included",
    "not contain",
    "not say",
    "n't mention",
    "n't contain",
    "n't say",
    "n't provide",
    "no information",
    "no mention",
    "cannot be found",
    "cannot answer",
    "unknown",
)
_ASK = f"If this is not in the documents, write: {MISSING}."


def _hide(draw: random.Random) -> Hidden:
    missing, *others = draw_keys(draw, 4)
    needles = tuple(
        (f"The manager of project {key} started work in {draw.randint(1900, 2020)}.", False)
        for key in others
    )
    question = f"In which year did the manager of project {missing} start work? {_ASK}"
    return Hidden("abstention", needles, question, (MISSING,))


KINDS: dict[str, Hide] = {"missing": _hide}


def without_gold(data: DataSet, count: int, seed: int) -> dict[str, tuple[Example, ...]]:
    """Return examples of a file without their gold chunks, by the file's name.

    Raises ConfigError: none has a gold chunk beside others.
    """
    found = []
    for each in data.examples:
        kept = tuple(chunk for chunk in each.chunks if not chunk.is_gold)
        if 0 < len(kept) < len(each.chunks):
            question = f"{each.question.strip()} {_ASK}"
            found.append(Example(each.id, question, (MISSING,), kept, "abstention"))
    if not found:
        raise ConfigError(f"no example of {data.name} has a gold chunk beside others")
    return {data.name: DataSet(data.name, tuple(found)).pick(count, seed).examples}


def says_missing(answer: str) -> bool:
    """Whether an answer says that the documents do not have it."""
    lower = answer.lower().replace("\u2019", "'")
    return any(phrase in lower for phrase in PHRASES)
