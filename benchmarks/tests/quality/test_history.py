"""Requests over recurring chunks: which are made, and what history changes in their figures."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import typer
from evaluations import load_tiny_models, small_data
from typer.testing import CliRunner

from ragkv.errors import ConfigError
from ragkv_bench.commands.evaluate import evaluate_command
from ragkv_bench.data.examples import write_data
from ragkv_bench.quality.history import HistoryPlan, draw_requests, evaluate_history


def _data(count):
    data = small_data(count)
    return replace(
        data,
        examples=tuple(
            replace(each, task="multihop_qa", question=f"What does {each.id} say?")
            for each in data.examples
        ),
    )


def test_topics_recur_in_their_order_and_mixed():
    data = _data(6)
    made = draw_requests(data, HistoryPlan(requests=400, seed=3))
    assert made == draw_requests(data, HistoryPlan(requests=400, seed=3))
    assert made != draw_requests(data, HistoryPlan(requests=400, seed=4))
    topics = {example.chunks for example in data.examples}
    plain = Counter(each.chunks for each in made if each.chunks in topics)
    assert 0.4 < plain.total() / 400 < 0.6
    assert plain.most_common()[0][1] > 3 * plain.most_common()[-1][1]
    assert all(len(set(each.chunks)) == len(each.chunks) in (2, 3) for each in made)
    for first in range(0, 396, 6):
        assert len({each.question for each in made[first : first + 6]}) == 6


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ConfigError, match="more than one task"):
        draw_requests(small_data(2), HistoryPlan())
    with pytest.raises(ConfigError, match="2 requests or more"):
        HistoryPlan(requests=1)


def test_history_computes_less_where_prompts_recur(make_engine):
    kv = make_engine()
    found = evaluate_history(kv, _data(2), HistoryPlan(requests=9), ratio=0.2)
    assert (found["model"], found["data"], found["method"]) == (kv.info.name, "mine", "query")
    rows = {(row["setting"], row["part"]): row for row in found["rows"]}
    settings = ("full", "no history", "history", "history, idle")
    parts = ("first", "second", "again")
    assert list(rows) == [(each, part) for each in settings for part in parts]
    assert [rows["full", part]["requests"] for part in parts[:2]] == [4, 5]
    orders = [each.chunks for each in draw_requests(_data(2), HistoryPlan(requests=9))]
    assert rows["full", "again"]["requests"] == 9 - len(set(orders))
    for half in ("first", "second"):
        full, without = rows["full", half], rows["no history", half]
        assert full["kl"] == 0
        assert full["computed_tokens"] == full["prompt_tokens"] == without["prompt_tokens"]
        assert without["computed_tokens"] < full["computed_tokens"]
        assert without["kl"] > 1e-6
        assert without["share_recomputed"] < 0.25
    for setting in settings[2:]:
        for part in parts[1:]:
            later, without = rows[setting, part], rows["no history", part]
            assert later["computed_tokens"] < without["computed_tokens"]
            assert later["share_recomputed"] < without["share_recomputed"]
    assert len(found["requests"]) == 4 * 9
    exact = evaluate_history(kv, _data(2), HistoryPlan(requests=4), ratio=1)
    assert all(row["kl"] < 1e-6 for row in exact["rows"])


def test_the_command(tmp_path, monkeypatch):
    load_tiny_models(monkeypatch)
    path, out = tmp_path / "d.jsonl", tmp_path / "h.json"
    write_data(path, _data(2).examples)
    app = typer.Typer()
    app.command()(evaluate_command)

    def run(*words):
        return CliRunner().invoke(
            app, [str(word) for word in ("--history", "--data", path, *words)]
        )

    result = run("--limit", 2, "--json", out)
    assert result.exit_code == 0
    assert "on d, 2 requests, query 0.2" in result.output
    assert "…" not in result.output
    assert json.loads(out.read_text())["plan"]["requests"] == 2
    for words in (("--methods", "query,reuse"), ("--ratio", "0.1,0.2")):
        assert "one method and one ratio" in str(run(*words).exception)
    assert "--time-in-turn changes nothing with" in str(run("--time-once").exception)
