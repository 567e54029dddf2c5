"""A whole evaluation on a tiny model: rows, resumption, summary, prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from evaluations import make_record, short_answers, small_data, stop_after  # noqa: F401  a fixture
from tiny import tiny_model, tiny_tokenizer

import ragkv
import ragkv_bench
from ragkv import RagKV
from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.select import Method, get_method
from ragkv.select.method import Spread
from ragkv_bench.data.examples import Chunk, DataSet, Example
from ragkv_bench.data.tasks import chunk_texts, prompt, template
from ragkv_bench.methods import named
from ragkv_bench.quality.calibration import calibrate
from ragkv_bench.quality.records import RecordFile
from ragkv_bench.quality.run import evaluate, grid
from ragkv_bench.quality.subject import _PACKAGES, Subject
from ragkv_bench.quality.summary import summarise
from ragkv_bench.results import short_name

_FIELDS = """
method ratio score retention kl agreement share_recomputed ttft_s speedup ci95
"""
FIELDS = set(_FIELDS.split())


def test_an_evaluation_has_a_row_for_every_method_and_ratio(make_engine, tmp_path):
    kv = make_engine()
    methods = ["prefix", "reuse", "epic", "cacheblend", "query"]
    found = evaluate(
        kv, small_data(), methods=methods, ratios=[0.2, 1], records=tmp_path / "r.jsonl"
    )
    rows = {(row.method, row.ratio): row for row in found.rows}
    assert list(rows) == [
        ("full", 1),
        ("prefix", 0),
        ("reuse", 0),
        *[(name, ratio) for name in methods[2:] for ratio in (0.2, 1)],
    ]
    assert (found.data, found.examples) == ("mine", 2)
    assert found.model == kv.info.name
    full = rows["full", 1]
    assert (full.kl, full.agreement, full.share_recomputed, full.speedup) == (0, 1, 1, 1)
    for name in methods[2:]:
        exact, part = rows[name, 1], rows[name, 0.2]
        assert exact.kl < 1e-6
        assert exact.agreement == exact.share_recomputed == 1
        assert exact.score == full.score
        assert part.kl > 1e-6
        if name == "query":  # and the copies that are repaired while the answer is fed
            assert 0.2 < part.share_recomputed < 0.3
        else:
            assert part.share_recomputed == pytest.approx(0.2, abs=0.02)
    assert rows["reuse", 0].share_recomputed == 0
    assert rows["prefix", 0].kl < 1e-6
    assert 0.3 < rows["prefix", 0].share_recomputed < 0.9  # the first of three chunks is a prefix
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert len(lines) == 2 * len(rows)


def test_the_json_is_what_is_promised(make_engine, tmp_path):
    found = evaluate(make_engine(), small_data(1), methods=["reuse"])
    found.save(tmp_path / "e.json")
    saved = json.loads((tmp_path / "e.json").read_text())
    assert list(saved) == ["model", "data", "examples", "rows"]
    assert [set(row) for row in saved["rows"]] == [FIELDS, FIELDS]
    assert set(saved["rows"][1]["ci95"]) <= FIELDS - {"method", "ratio", "ci95"}
    assert {"kl", "agreement", "ttft_s", "speedup"} <= set(saved["rows"][1]["ci95"])


def test_an_interrupted_run_goes_on_where_it_stopped(make_engine, tmp_path, monkeypatch):
    kv, path = make_engine(), tmp_path / "folder" / "r.jsonl"

    def run(**changes):
        return evaluate(kv, small_data(), methods=["reuse", "epic"], records=path, **changes)

    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            run()
    path.write_bytes(path.read_bytes() + b'{"key": "torn by a po')
    with monkeypatch.context() as patch:
        seen = stop_after(patch, None)
        found = run()
        assert seen == [("x_1", "reuse"), ("x_1", "epic")]
        assert [row.method for row in found.rows] == ["full", "reuse", "epic"]
        assert len(path.read_text().splitlines()) == 6
        seen.clear()
        evaluate(kv, small_data(), methods=["prefix", "reuse", "epic"], records=path)
        assert seen == [("x_0", "prefix"), ("x_1", "prefix")]


def test_records_depend_on_everything_that_is_measured(make_engine):
    example = small_data().examples[0]

    def key(kv, example, ratio=0.2):
        return Subject(kv, example, ["epic"]).key("epic", ratio)

    kv = make_engine()
    same = key(kv, example)
    assert same == key(kv, replace(example))
    others = {
        key(kv, example, 0.3),
        key(kv, replace(example, question="Else?")),
        key(kv, replace(example, answers=("c",))),
        key(kv, replace(example, chunks=example.chunks[:2])),
        key(make_engine("qwen2"), example),
    }
    with RagKV(tiny_model(seed=1), tiny_tokenizer(), store=":memory:") as other:
        assert other.info.name == kv.info.name
        others.add(key(other, example))
    assert len(others | {same}) == 7


def test_a_file_of_something_else_is_not_overwritten(tmp_path):
    path = tmp_path / "mine.jsonl"
    for text in ("my diary\n", '{"id": 1}\n', "[]\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"mine\.jsonl has a line that is no record"):
            RecordFile(path)
        assert path.read_text() == text
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordFile(tmp_path / "mine.jsonl" / "r.jsonl")


def test_ttft_is_taken_in_turn_or_once(make_engine, monkeypatch):
    kv, calls = make_engine(), []
    prefill = kv.prefill

    def spy(text, **overrides):
        calls.append(overrides["method"])
        return prefill(text, **overrides)

    monkeypatch.setattr(kv, "prefill", spy)
    evaluate(kv, small_data(1), methods=["reuse", "epic"])
    assert calls == ["full", "full", "reuse", "full", "epic"]
    calls.clear()
    evaluate(kv, small_data(1), methods=["reuse", "epic"], time_in_turn=False)
    assert calls == ["full", "reuse", "epic"]


def test_a_prompt_that_is_too_long_is_left_out(make_engine, monkeypatch, caplog):
    kv = make_engine()
    prefill = kv.prefill

    def refuse_second(text, **overrides):
        if "Title 1" in text[0]["content"]:
            raise PromptTooLongError("too long")
        return prefill(text, **overrides)

    monkeypatch.setattr(kv, "prefill", refuse_second)
    found = evaluate(kv, small_data(), methods=["reuse"])
    assert found.examples == 1
    assert "x_1 is skipped: too long" in caplog.text
    only = DataSet("mine", small_data().examples[1:])
    with pytest.raises(ConfigError, match="no example of mine"):
        evaluate(kv, only, methods=["reuse"])


OTHER = replace(get_method("epic"), spread=Spread(0.1, 4.0))
BAD = [
    (["reuse", "magic"], [0.2], "no method 'magic'"),
    (["epic"], [1.5], "recompute_ratio"),
    ([], [0.2], "at least one method"),
    (["epic"], [], "epic needs at least one ratio"),
    (["epic"], ["auto"], "epic needs at least one ratio: it cannot choose"),
    (["epic", OTHER], [0.2], "two methods are called epic"),
    ([replace(OTHER, name="full")], [0.2], "two methods are called full"),
]


@pytest.mark.parametrize(("methods", "ratios", "words"), BAD)
def test_bad_settings_are_refused_before_anything_runs(make_engine, methods, ratios, words):
    with pytest.raises(ConfigError, match=words):
        evaluate(make_engine(), small_data(), methods=methods, ratios=ratios)


def test_each_setting_is_measured_once_and_auto_where_it_can_be_chosen():
    found = grid(["full", "query", "epic", get_method("epic"), "reuse"], [0.1, "auto"])
    assert [(get_method(method).name, ratio) for method, ratio in found] == [
        ("full", 1.0),
        ("query", 0.1),
        ("query", "auto"),
        ("epic", 0.1),
        ("reuse", 0.0),
    ]


def test_examples_that_show_nothing_of_reuse_are_said(make_engine, caplog):
    kv, data = make_engine(), small_data(2)
    short = replace(data.examples[0], id="short", chunks=(Chunk("Ada wrote."), Chunk("Bob.")))
    for run in (partial(evaluate, methods=["query"]), calibrate):
        with pytest.raises(ConfigError, match="no chunk of mine is long enough to be reused"):
            run(kv, DataSet("mine", (short,)))
    found = evaluate(kv, DataSet("mine", (short, data.examples[1])), methods=["reuse"])
    assert found.examples == 2
    assert "1 of 2 examples of mine have no chunk that is long enough to be reused" in caplog.text


def test_auto_is_a_ratio_like_others(make_engine, tmp_path):
    kv, path = make_engine(), tmp_path / "r.jsonl"
    found = evaluate(kv, small_data(1), methods=["query"], ratios=["auto", 1], records=path)
    assert [row.ratio for row in found.rows] == [1, "auto", 1]
    share = found.rows[1].share_recomputed
    assert 0.05 <= share <= 0.5  # the floor and ceiling of "auto", and what answering adds
    again = evaluate(kv, small_data(1), methods=["query"], ratios=["auto", 1], records=path)
    assert again == found  # "auto" is taken up from the file, times included


def test_a_summary_worked_out_by_hand():
    records = []
    for i, (full, method, ttft) in enumerate([(1, 0.5, 1), (0, 1, 2), (0.5, 0.5, 4)]):
        records.append(make_record(str(i), "full", 1.0, score=full, ttft_s=8.0, ttft_full_s=8.0))
        records.append(
            make_record(str(i), "m", score=method, kl=i * 0.3, agreement=i / 2, share_recomputed=0.2,
                    ttft_s=ttft, ttft_full_s=8.0)
        )  # fmt: skip
    full, row = summarise(records)
    assert (full.score, full.retention) == (0.5, 1)
    assert row.score == pytest.approx(2 / 3)
    assert row.retention == pytest.approx(1 / 1.5)  # of the first and the third
    assert row.kl == pytest.approx(0.3)
    assert (row.agreement, row.ttft_s, row.speedup) == (0.5, 2, 4)
    assert row.ci95["speedup"] == (2, 8)
    for name, (low, high) in row.ci95.items():
        assert low <= getattr(row, name) <= high


def test_where_full_attention_answers_nothing_retention_has_no_value():
    full, row = summarise([make_record("0", "full", 1.0), make_record("0", "m", score=1.0)])
    for one in (full, row):
        assert one.retention is None
        assert "retention" not in one.ci95
    assert row.score == 1


def test_prompts_hold_every_chunk_verbatim_behind_the_sink(make_engine, caplog):
    kv = make_engine()
    evaluate(kv, small_data(), methods=["reuse"])
    assert "head is not the text" not in caplog.text
    for example in small_data().examples:
        messages = prompt(example)
        text = kv.tokenizer.apply_chat_template(messages, tokenize=False)
        assert text.startswith(kv.sink_from(template(example.task)) + chunk_texts(example)[0])
        bare = prompt(example, chat=False)
        assert isinstance(bare, str)
        for chunk in chunk_texts(example):
            assert chunk in messages[0]["content"]
            assert chunk in bare
        assert "{this}" in messages[0]["content"]  # braces in the data are left alone
        assert bare.startswith(kv.sink_from(template(example.task, chat=False)))
    assert chunk_texts(Example("i", "q", ("a",), (Chunk(" text\n"),), "summarization")) == ["text"]


def test_a_base_model_is_given_the_bare_prompt(make_engine, monkeypatch):
    kv = make_engine()
    monkeypatch.setattr(kv.tokenizer, "chat_template", None)
    found = evaluate(kv, small_data(1), methods=["epic"], ratios=[1.0])
    assert found.rows[1].kl < 1e-6


def test_a_method_of_ones_own_stands_beside_the_named_ones(make_engine):
    own = replace(OTHER, name="mine")
    kv, data = make_engine(), small_data()
    found = evaluate(kv, data, methods=["epic", own], ratios=[0.3])
    assert [row.method for row in found.rows] == ["full", "epic", "mine"]
    subject = Subject(kv, data.examples[0], [own])
    assert subject.key(own, 0.3) != subject.key("epic", 0.3)
    assert subject.key(own, 0.3) != subject.key(replace(own, spread=Spread(0.1, 2.0)), 0.3)


def test_what_another_version_or_a_rule_of_ones_own_measured_is_measured_again(
    make_engine, monkeypatch
):
    subject = Subject(make_engine(), small_data(1).examples[0], ["epic"])
    known = {subject.key(name, 0.3) for name in ("epic", "query", named("prophetkv")) * 2}
    assert len(known) == 3
    own = Method("mine", score=lambda scene: scene.layout.cached)
    assert subject.key(own, 0.3) != subject.key(own, 0.3)
    assert tuple(Path(each.__file__).parent for each in (ragkv, ragkv_bench)) == _PACKAGES
    monkeypatch.setattr("ragkv_bench.quality.subject._digest", lambda: "another version")
    assert subject.key("epic", 0.3) not in known


def test_titles_name_a_folder_without_the_way_to_it():
    assert short_name("/models/here/small-1B") == "small-1B"
    assert short_name("org/small-1B") == "org/small-1B"
