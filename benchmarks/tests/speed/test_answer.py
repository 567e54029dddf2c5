"""Whole answers: what is timed, what is compared, and what the result says."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from peer import Peer
from tiny import tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.errors import ConfigError
from ragkv_bench.results import write
from ragkv_bench.speed.answer import AnswerPlan, bench_answers, tables

PLAN = AnswerPlan(tokens=(300, 400), answer_tokens=(4, 12), chunk_tokens=100, rounds=3)


@pytest.fixture(scope="module")
def kv():
    with RagKV(tiny_model(), tiny_tokenizer(), store=":memory:") as engine:
        yield engine


@pytest.fixture(scope="module")
def measured(kv):
    peer = Peer()
    found = bench_answers(kv.loaded, PLAN, peers=[nullcontext(peer)])
    return found, peer


def test_there_is_a_row_for_every_setting_and_length(measured):
    rows = measured[0]["rows"]
    assert {(r["tokens"], r["answer_tokens"], r["method"], r["ratio"]) for r in rows} == {
        (tokens, count, *setting)
        for tokens in PLAN.tokens
        for count in PLAN.answer_tokens
        for setting in (("query", 0.2), ("full", 1.0))
    }
    for row in rows:
        assert row["rounds"] == 3
        assert 0 < row["ttft_s"] < row["total_s"]
        assert 0 < row["full_ttft_s"] < row["full_total_s"]
        assert row["tokens_per_step"] >= 1
        later = 1e3 * (row["total_s"] - row["ttft_s"]) / (row["answer_tokens"] - 1)
        assert row["ms_per_token"] == pytest.approx(later)
        low, high = row["quartiles"]
        assert low <= row["speedup_total"] <= high


def test_peers_draw_as_many_tokens_after_the_same_prompts(measured):
    found, peer = measured
    assert len(peer.asked) == len(found["peers"]) * 4
    for row, asked in zip(found["peers"], range(0, len(peer.asked), 4), strict=True):
        length = row["tokens"], row["answer_tokens"]
        requests = peer.asked[asked : asked + 4]
        assert {tokens for _, tokens in requests} == {row["answer_tokens"]}
        assert all(0 <= row["tokens"] - len(ids) < 20 for ids, _ in requests)
        assert row["ms_per_token"] == pytest.approx(100)
        assert row["total_s"] == pytest.approx(1 + 0.1 * (row["answer_tokens"] - 1))
        own = next(r for r in found["rows"] if (r["tokens"], r["answer_tokens"]) == length)
        assert row["speedup_total"] == pytest.approx(row["total_s"] / own["total_s"])


def test_the_table_has_all_engines(measured, tmp_path):
    write(tmp_path / "answers.json", measured[0])
    (table,) = tables(json.loads((tmp_path / "answers.json").read_text()))
    methods = list(table.columns[0].cells)
    assert [methods.count(name) for name in ("transformers", "query 0.2", "peer")] == [4, 4, 4]
    assert methods[:4] == ["transformers", "query 0.2", "full", "peer"]


def test_llama_cpp_can_decode(kv, monkeypatch):
    monkeypatch.setattr("ragkv.engine.settings.extension", lambda *_: None)
    plan = AnswerPlan(tokens=(300,), answer_tokens=(4,), methods=("query+llama.cpp", "full"))
    assert plan.settings == [("query+llama.cpp", 0.2), ("full", 1.0)]
    with pytest.raises(ConfigError, match="needs a GGUF file"):
        bench_answers(kv.loaded, plan)


WRONG = [{"tokens": ()}, {"answer_tokens": (1,)}, {"answer_tokens": (4, 4)}, {"rounds": 0}]


@pytest.mark.parametrize("wrong", [*WRONG, {"ratios": (1.5,)}, {"methods": ("none",)}])
def test_plans_that_cannot_be_measured_are_refused(wrong):
    with pytest.raises(ConfigError):
        AnswerPlan(**wrong)
