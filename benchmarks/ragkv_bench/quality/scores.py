"""Task scores: token F1, ROUGE-L, needle recall; all from 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragkv.engine.quality import is_copied
from ragkv_bench.data.tasks import TASKS
from ragkv_bench.probes.abstention import says_missing
from ragkv_bench.probes.aggregation import counts

if TYPE_CHECKING:
    from ragkv_bench.data.examples import Example

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Thai, Lao, Myanmar, Khmer, kana and Chinese characters: written without spaces between words.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_PIECES = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


def score(example: Example, answer: str) -> float:
    """Score an answer by its task's metric."""
    kind = TASKS[example.task].kind
    if kind == "qa":
        return token_f1(answer, example.answers)
    if kind == "summary":
        return rouge_l(answer, example.answers[0])
    if kind == "copy":
        return float(is_copied(answer, example.answers[0]))
    if kind == "abstention":
        return float(says_missing(answer))
    if kind == "count":
        return float(counts(answer, example.answers[0]))
    return needle_recall(answer, example.answers)


def normalise(text: str) -> str:
    """Lower-case, drop ASCII punctuation and articles, collapse white space.

    Where a language has no spaces between words, every character is a word, and all punctuation
    beside it is dropped.

    Source: SQuAD v1.1's evaluation, arXiv 1606.05250, section 6.1; the characters as LongBench
    (arXiv 2308.14508) scores Chinese words.
    """
    words = _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
    pieces = (_PIECES.findall(word) if _HAS_UNSPACED.search(word) else [word] for word in words)
    return " ".join(piece for each in pieces for piece in each)


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Return the highest F1 of normalised tokens over the references."""
    return max(_f1(normalise(answer).split(), normalise(ref).split()) for ref in references)


def needle_recall(answer: str, needles: Sequence[str]) -> float:
    """Return the share of needles that are in the answer as substrings, case ignored.

    Source: RULER, arXiv 2404.06654, ``string_match_all``.
    """
    lower = answer.lower()
    return sum(needle.lower() in lower for needle in needles) / len(needles)


def rouge_l(answer: str, reference: str) -> float:
    """Return ROUGE-L's F1 without stemming, through rouge-score.

    Its own words are of ASCII letters and digits; here what it would leave out of other scripts is
    a word too, or a word a character in languages without spaces.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=_RougeWords())
    return float(scorer.score(reference, answer)["rougeL"].fmeasure)


class _RougeWords:
    """The tokenizer that rouge-score is given."""

    def tokenize(self, text: str) -> list[str]:
        from rouge_score.tokenize import tokenize

        pieces = _PIECES.findall(text.lower())
        return [word for piece in pieces for word in (tokenize(piece, None) or [piece])]


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))
