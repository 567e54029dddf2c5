"""Scores against values worked out by hand."""

from __future__ import annotations

import re
import string

import pytest

from ragkv_bench.data.examples import Chunk, Example
from ragkv_bench.quality.scores import (
    _RougeWords,
    needle_recall,
    normalise,
    rouge_l,
    score,
    token_f1,
)


def _example(task, *answers, example_id="x_1"):
    return Example(example_id, "Q?", answers, (Chunk("text"),), task)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat,\n sat!", "cat sat"),
        ("An apple a day", "apple day"),
        ("Theodore's atheist", "theodores atheist"),
        ("U.S.A.", "usa"),
        ("the", ""),
    ],
)
def test_normalisation_is_squads(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "references", "f1"),
    [
        ("The goalkeeper.", ["goalkeeper"], 1.0),
        ("a Welsh goalkeeper", ["goalkeeper"], 2 * (1 / 2) * 1 / (1 / 2 + 1)),
        ("red red blue", ["red blue blue"], 2 * 2 / 6),  # counts, not sets
        ("green", ["red"], 0.0),
        ("", ["red"], 0.0),
        ("the", ["an"], 1.0),  # both normalise to nothing
        ("KILM airport", ["Wilmington International Airport", "KILM"], 2 / 3),  # max over answers
    ],
)
def test_token_f1(answer, references, f1):
    assert token_f1(answer, references) == pytest.approx(f1)


def test_needle_recall_is_the_share_found_whatever_the_case():
    assert needle_recall("They are 123, 456", ["123", "456", "789", "000"]) == 0.5
    assert needle_recall("Brisk-Otter", ["brisk-otter"]) == 1
    assert needle_recall("", ["1"]) == 0


def test_rouge_l_is_the_longest_common_subsequence():
    # "the cat the mat" stands in both in this order: 4 of 6 tokens each.
    assert rouge_l("the cat lay under the mat", "the cat sat on the mat") == pytest.approx(4 / 6)
    # 2 of 2 tokens of the answer, 2 of 6 of the reference; stems do not count.
    assert rouge_l("cat mat", "the cat sat on the mat") == pytest.approx(2 * 1 * (1 / 3) / (4 / 3))
    assert rouge_l("cats", "cat") == 0
    assert rouge_l("", "cat") == 0


NEAR = [
    # language, answer, reference, F1 and ROUGE-L: characters in common and in order
    ("Chinese", "他出生在北京市。", "他出生于北京市", 12 / 14, 12 / 14),
    ("Japanese", "東京タワーは、高いです", "東京タワーは高い", 16 / 18, 16 / 18),
    ("Thai", "กรุงเทพ", "กรุงเทพ", 1, 1),
    ("mixed", "使用 Python 3 编写", "Python 3 编写", 8 / 10, 8 / 10),
    ("mixed without spaces", "用Python编写", "python编写", 6 / 7, 6 / 7),
    ("Russian", "Анна живёт в Москве", "Анна живёт в Киеве", 3 / 4, 3 / 4),
]


@pytest.mark.parametrize(
    ("answer", "reference", "f1", "rouge"),
    [each[1:] for each in NEAR],
    ids=[each[0] for each in NEAR],
)
def test_languages_without_spaces_are_scored_by_characters(answer, reference, f1, rouge):
    assert token_f1(answer, [reference]) == pytest.approx(f1)
    assert rouge_l(answer, reference) == pytest.approx(rouge)


def test_punctuation_of_languages_without_spaces_is_dropped():
    assert normalise("「東京」、大阪・京都\uff01") == "東 京 大 阪 京 都"


ENGLISH = (
    "The U.S. don't re-elect “anyone” — café_noir costs 1,000 €!",
    "a snake_case name, the 2nd e-mail",
    "",
    " \n\t",
)


@pytest.mark.parametrize("text", ENGLISH)
def test_languages_with_spaces_are_scored_as_squad_and_rouge_score_do(text):
    from rouge_score.tokenize import tokenize

    words = text.lower().translate(str.maketrans("", "", string.punctuation))
    assert normalise(text).split() == re.sub(r"\b(a|an|the)\b", " ", words).split()
    assert _RougeWords().tokenize(text) == tokenize(text, None)


def test_the_task_decides_the_metric():
    qa = score(_example("singlehop_qa", "goalkeeper"), "a Welsh goalkeeper")
    assert qa == pytest.approx(2 / 3)
    summary = score(_example("summarization", "the cat sat", "cat"), "cat")
    assert summary == pytest.approx(0.5)  # the first reference alone
    assert score(_example("niah_multivalue", "1", "2"), "2") == 0.5
