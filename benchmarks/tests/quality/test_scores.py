"""Scores against values worked out by hand."""

from __future__ import annotations

import pytest

from ragkv_bench.data.tasks import TASKS
from ragkv_bench.quality import Chunk, Example
from ragkv_bench.quality.scores import (
    exact_match,
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


def test_exact_match_takes_any_reference():
    assert exact_match("the  Answer!", ["other", "answer"]) == 1
    assert exact_match("answer two", ["answer"]) == 0


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


def test_the_task_decides_the_metric():
    qa = score(_example("singlehop_qa", "goalkeeper"), "a Welsh goalkeeper")
    assert (qa.value, qa.exact_match) == (pytest.approx(2 / 3), 0)
    summary = score(_example("summarization", "the cat sat", "cat"), "cat")
    assert summary.value == pytest.approx(0.5)  # the first reference alone
    assert summary.exact_match is None
    assert score(_example("niah_multivalue", "1", "2"), "2").value == 0.5


def test_generation_lengths():
    lengths = {name: task.length("x_1") for name, task in TASKS.items()}
    assert lengths == {
        "multihop_qa": 32,
        "singlehop_qa": 32,
        "summarization": 160,
        "niah_single": 64,
        "niah_multikey": 64,
        "niah_multivalue": 128,
        "niah_multiquery": 128,
    }
    assert TASKS["summarization"].length("qmsum_val_31_00") == 160
    assert TASKS["summarization"].length("samsum_7") == 80
