"""Whole answers: what is timed, what is compared, and what the result says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.errors import ConfigError, MissingDependencyError
from ragkv_bench.data.examples import Chunk, DataSet, Example
from ragkv_bench.speed.answer import AnswerPlan, bench_answers
from ragkv_bench.speed.chart import answer_chart
from ragkv_bench.speed.result import AnswerBenchmark
from ragkv_bench.speed.table import answer_tables
from ragkv_bench.speed.weights import quantised_model

PLAN = AnswerPlan(tokens=(300, 400), answer_tokens=(4, 12), chunk_tokens=100, rounds=2)


@pytest.fixture(scope="module")
def kv() -> Iterator[RagKV]:
    with RagKV(tiny_model(), tiny_tokenizer(), store=":memory:") as engine:
        yield engine


class Peer:
    """Takes a second to its first token, and a tenth for each later one."""

    name = "peer"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def answer(self, ids: Sequence[int], tokens: int) -> tuple[float, float]:
        """Note the request."""
        self.asked.append((len(ids), tokens))
        return 1.0, 1.0 + 0.1 * (tokens - 1)


@pytest.fixture(scope="module")
def measured(kv: RagKV) -> tuple[AnswerBenchmark, Peer]:
    peer = Peer()

    @contextmanager
    def opening() -> Iterator[Any]:
        yield peer

    before = kv.model.generation_config.eos_token_id
    found = bench_answers(kv.loaded, PLAN, peers=[opening])
    assert kv.model.generation_config.eos_token_id == before
    return found, peer


def test_there_is_a_row_for_every_setting_and_length(
    measured: tuple[AnswerBenchmark, Peer],
) -> None:
    rows = measured[0].rows
    assert {(row.tokens, row.answer_tokens, row.method, row.ratio) for row in rows} == {
        (tokens, count, *setting)
        for tokens in PLAN.tokens
        for count in PLAN.answer_tokens
        for setting in (("query", 0.2), ("full", 1.0))
    }
    for row in rows:
        assert row.rounds == 2
        assert 0 < row.ttft_s < row.total_s
        assert 0 < row.full_ttft_s < row.full_total_s
        assert row.tokens_per_step >= 1
        later = row.answer_tokens - 1
        assert row.ms_per_token == pytest.approx(1e3 * (row.total_s - row.ttft_s) / later, rel=0.3)
        low, high = row.quartiles
        assert low <= row.speedup_total <= high


def test_peers_draw_as_many_tokens_after_the_same_prompts(
    measured: tuple[AnswerBenchmark, Peer],
) -> None:
    found, peer = measured
    assert len(peer.asked) == len(found.peers) * 3
    for row, asked in zip(found.peers, range(0, len(peer.asked), 3), strict=True):
        requests = peer.asked[asked : asked + 3]
        assert {tokens for _, tokens in requests} == {row.answer_tokens}
        assert all(0 <= row.tokens - length < 20 for length, _ in requests)
        assert row.ms_per_token == pytest.approx(100)
        assert row.total_s == pytest.approx(1 + 0.1 * (row.answer_tokens - 1))
        own = next(r for r in found.rows if (r.tokens, r.answer_tokens) == (row.tokens, row.answer_tokens))  # fmt: skip
        assert row.speedup_total == pytest.approx(row.total_s / own.total_s, rel=0.5)


def test_results_are_saved_shown_and_drawn(
    measured: tuple[AnswerBenchmark, Peer], tmp_path: Path
) -> None:
    found, _ = measured
    found.save(tmp_path / "answers.json")
    assert AnswerBenchmark.load(tmp_path / "answers.json").rows == found.rows
    saved = json.loads((tmp_path / "answers.json").read_text())
    assert {"model", "device", "rows", "peers", "setup"} <= set(saved)
    (table,) = answer_tables(found)
    methods = list(table.columns[0].cells)
    assert methods.count("transformers") == methods.count("query 0.2") == 4
    assert methods.count("peer") == 4
    answer_chart(found).savefig(tmp_path / "answers.png")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="bench answer"):
        AnswerBenchmark.load(tmp_path / "other.json")


def test_questions_of_a_file_are_asked(kv: RagKV) -> None:
    chunks = tuple(Chunk(text) for text in some_chunks(3))
    examples = tuple(
        Example(f"e{n}", f"What is rule {n}?", ("it",), chunks, "multihop_qa") for n in range(4)
    )
    plan = AnswerPlan(answer_tokens=(3,), methods=("query",), rounds=2)
    found = bench_answers(kv.loaded, plan, data=DataSet("mine", examples))
    (row,) = found.rows
    assert row.rounds == 2
    assert 200 < row.tokens < 800
    with pytest.raises(ConfigError, match="two or more"):
        bench_answers(kv.loaded, plan, data=DataSet("mine", examples[:1]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": ()},
        {"answer_tokens": (1,)},
        {"answer_tokens": (4, 4)},
        {"rounds": 0},
        {"ratios": (1.5,)},
        {"methods": ("none",)},
    ],
)
def test_plans_that_cannot_be_measured_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AnswerPlan(**wrong)


def test_quantised_weights_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingDependencyError, match="pip install torchao"):
        quantised_model(None, "int8", dtype=None, device=None)
