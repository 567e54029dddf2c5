"""The demo, both frameworks, on a tiny model."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from figures import Pair, figures_of
from texts import QUESTIONS, TOPICS, corpus_chunks
from tiny import saved, tiny_tokenizer
from typer.testing import CliRunner

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.fixture(scope="module")
def run_demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    saved(folder / "model", layers=2)

    def run(*args: object):
        size = ("--topics", 1, "--questions", 2, "--max-new-tokens", 6, "--top-k", 3)
        own = (
            "--model",
            folder / "model",
            "--store",
            folder / "store",
            "--json",
            folder / "f.json",
        )
        words = [*map(str, (*own, *size, *args))]
        result = CliRunner().invoke(runpy.run_path(str(DEMO))["app"], words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result, json.loads((folder / "f.json").read_text(encoding="utf-8"))

    return run


def test_both_frameworks_and_a_second_run(run_demo):
    first, figures = run_demo()
    assert "chunks computed" in first.stderr
    assert set(figures) == {"model", "chunks", "questions", "precompute_s", "frameworks"}
    assert list(figures["frameworks"]) == ["llama-index", "langchain"]
    assert figures["questions"] == 2
    for each in figures["frameworks"].values():
        assert len(each["ttft_full_s"]) == len(each["ttft_ragkv_s"]) == len(each["answers"]) == 2
        assert each["speedup_median"] > 0
        assert 0 <= each["token_agreement"] <= 1
        for answer in each["answers"]:
            assert set(answer) == {
                "question",
                "full",
                "ragkv",
                "prompt_tokens",
                "reused_tokens",
                "recomputed_tokens",
            }
            assert answer["reused_tokens"] > answer["recomputed_tokens"] > 0
            assert answer["prompt_tokens"] > answer["reused_tokens"] + answer["recomputed_tokens"]
    by_framework = [each["answers"] for each in figures["frameworks"].values()]
    assert by_framework[0] == by_framework[1], "both frameworks build the same prompts"

    second, figures = run_demo("--framework", "langchain")
    assert "nothing to compute" in second.stderr
    assert list(figures["frameworks"]) == ["langchain"]


def test_errors_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", "--method", "magic", "--store", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DEMO), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().startswith("Error: no method 'magic'")


def test_at_ratio_1_the_answers_are_the_same(run_demo):
    _, figures = run_demo("--recompute-ratio", 1)
    for each in figures["frameworks"].values():
        assert each["token_agreement"] == 1
        assert all(answer["full"] == answer["ragkv"] for answer in each["answers"])


def answer(ttft_s: float, *token_ids: int) -> dict:
    tokens = dict.fromkeys(("prompt", "reused", "recomputed"), 9)
    return {
        "text": "text",
        "token_ids": token_ids,
        "ttft_s": ttft_s,
        "total_s": 9.0,
        "tokens": tokens,
    }


@pytest.mark.parametrize(
    ("full", "ragkv", "share"),
    [
        ((1, 2, 3, 4), (1, 2, 9, 4), 0.75),
        ((1, 2), (1, 2, 3, 4), 0.5),
        ((*range(16), 90), (*range(16), 91), 1.0),
        ((), (), 1.0),
        ((), (5,), 0.0),
    ],
)
def test_agreement_is_place_by_place(full, ragkv, share):
    assert Pair("?", answer(1, *full), answer(1, *ragkv)).agreement == share


def test_speedup_is_the_median_of_the_questions_own():
    pairs = [Pair("?", answer(full, 1), answer(1, 1)) for full in (2.0, 3.0, 10.0)]
    assert figures_of(pairs)["speedup_median"] == 3.0


def test_there_are_enough_questions_about_the_corpus():
    assert {topic for topic, _ in QUESTIONS} <= set(TOPICS)
    assert len(QUESTIONS) >= 12


def test_topics_do_not_contain_one_another():
    chunks = corpus_chunks(TOPICS[:8], tiny_tokenizer(), 400)
    assert len(chunks) == len(set(chunks))
    assert not [a for a in chunks for b in chunks if a is not b and len(a) > 80 and a in b]
