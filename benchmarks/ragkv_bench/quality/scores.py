"""Task scores: token F1 and exact match, ROUGE-L, needle recall; all from 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ragkv_bench.data.tasks import TASKS

if TYPE_CHECKING:
    from ragkv_bench.data.examples import Example

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Score:
    """An answer's main score; ``exact_match`` (0 or 1) in the question-answering tasks."""

    value: float
    exact_match: float | None = None


def score(example: Example, answer: str) -> Score:
    """Score an answer by its task's metric."""
    kind = TASKS[example.task].kind
    if kind == "qa":
        return Score(token_f1(answer, example.answers), exact_match(answer, example.answers))
    if kind == "summary":
        return Score(rouge_l(answer, example.answers[0]))
    return Score(needle_recall(answer, example.answers))


def normalise(text: str) -> str:
    """Lower-case, drop ASCII punctuation and articles, collapse white space.

    Source: SQuAD v1.1's evaluation, arXiv 1606.05250, section 6.1.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Return the highest F1 of normalised tokens over the references."""
    return max(_f1(normalise(answer).split(), normalise(ref).split()) for ref in references)


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the normalised answer is one of the normalised references, else 0."""
    return float(any(normalise(answer) == normalise(ref) for ref in references))


def needle_recall(answer: str, needles: Sequence[str]) -> float:
    """Return the share of needles that are in the answer as substrings, case ignored.

    Source: RULER, arXiv 2404.06654, ``string_match_all``.
    """
    lower = answer.lower()
    return sum(needle.lower() in lower for needle in needles) / len(needles)


def rouge_l(answer: str, reference: str) -> float:
    """Return ROUGE-L's F1 without stemming, through rouge-score."""
    return float(_rouge_scorer().score(reference, answer)["rougeL"].fmeasure)


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped,unused-ignore]

    return RougeScorer(["rougeL"], use_stemmer=False)


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))
