"""``ragkv eval --probe``: rows, figures worked out by hand, a run that is taken up again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from evaluations import load_tiny_models, make_record, run_eval, stop_after

from ragkv.errors import ConfigError
from ragkv_bench.data.examples import Chunk, Example, write_data
from ragkv_bench.data.tasks import TASKS
from ragkv_bench.probes.run import differs_in_copy, summarise
from ragkv_bench.probes.sets import ProbeSet
from ragkv_bench.quality.intervals import wilson

FIELDS = """
probe method ratio tokens n rate rate_low rate_high kl kl_worst differs_in_copy kinds
"""


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    """Let the command load a tiny model, whose answers are short."""
    load_tiny_models(monkeypatch)
    for name, task in TASKS.items():
        monkeypatch.setitem(TASKS, name, replace(task, max_new_tokens=4))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("A plain sentence stands here, and it says nothing. " * 50)
    return path


def test_probes_to_table_and_json_and_on_where_they_stopped(tmp_path, text, monkeypatch):
    out = tmp_path / "p.json"
    command = ("--probe", "copies, abstention,length", "--methods", "reuse,epic", "--ratio", "0.2", "--tokens",
               "700,900", "--limit", 2, "--haystack", text, "--seed", 3, "--json", out)  # fmt: skip
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        assert run_eval(*command).exit_code == 130
    seen = stop_after(monkeypatch, None)
    result = run_eval(*command)
    assert result.exit_code == 0
    assert len(seen) == 6 * 2 * 3 - 7
    saved = json.loads(out.read_text())
    assert list(saved) == ["model", "rows"]
    for row in saved["rows"]:
        assert list(row) == FIELDS.split()
        assert row["n"] == 2
        assert 0 <= row["rate_low"] <= row["rate"] <= row["rate_high"] <= 1
        assert row["kl"] <= row["kl_worst"]
        assert (row["kl_worst"] > 0) == (row["method"] != "full")
    keys = [(row["probe"], row["tokens"], row["method"], row["ratio"]) for row in saved["rows"]]
    settings = [("full", 1.0), ("reuse", 0.0), ("epic", 0.2)]
    probes = ("copies", "abstention", "length")
    assert keys == [(p, t, *each) for p in probes for t in (700, 900) for each in settings]
    assert saved["rows"][0]["kinds"].keys() == {"name", "number"}
    for words in ("abstention", "epic 0.2", "in copy", "700"):
        assert words in result.output


def test_a_files_questions_without_their_gold_chunks(tmp_path):
    path, out = tmp_path / "d.jsonl", tmp_path / "p.json"
    chunks = (Chunk("Ada founded it in 1815.", is_gold=True), Chunk("Something else. " * 20))
    write_data(path, [Example("a", "Who?", ("Ada",), chunks, "singlehop_qa")])
    run_eval("--probe", "abstention", "--data", path, "--methods", "reuse", "--json", out)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["tokens"], row["n"], list(row["kinds"])) for row in rows] == [(None, 1, ["d"])] * 2


PROBE = ("--probe", "copies")
REFUSED = [
    ((*PROBE, "--needles", "single"), "--needles changes nothing with --probe"),
    ((*PROBE, "--history"), "--history changes nothing with --probe"),
    ((*PROBE, "--tokens", "4k"), "--tokens takes lengths such as 4096,8192, not '4k'"),
    ((*PROBE, "--tokens", "8192"), "has 4096 positions, not 8192"),
    (("--probe", "all"), "takes copies, abstention, aggregation, length, not all"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED)
def test_what_does_not_fit_together_is_refused(arguments, named):
    with pytest.raises(ConfigError, match=named):
        run_eval(*arguments)


@pytest.mark.parametrize(
    ("answer", "inside"),
    [
        ("It is 12 Elm Lane.", False),  # the same
        ("It is 12 Elk Lane.", True),
        ("It is 22 Elm Lane.", True),
        ("It was 12 Elm Lane.", False),
        ("It is 12 Elm Lane, I say.", False),
        ("It is 12 Elm Lanes.", True),
        ("It is 12 Elm", True),  # ends too early
        ("It is ", True),
        ("It", False),
        ("", False),
    ],
)
def test_where_an_answer_first_differs(answer, inside):
    assert differs_in_copy("It is 12 Elm Lane.", answer, ["12 Elm Lane"]) == inside
    assert not differs_in_copy("It is 13 Oak Lane.", answer, ["12 Elm Lane"])


def test_a_row_worked_out_by_hand():
    def example(name, task, answer):
        return Example(name, "?", (answer,), (Chunk("text"),), task)

    kinds = {
        "number": [example("a", "copy", "123"), example("b", "copy", "456")],
        "count": [example("c", "count", "7")],
        "never": [],
    }
    records = []
    for at, (full, own) in enumerate((("123", "124"), ("456", "456"), ("7", "8"))):
        name = "abc"[at]
        records.append(make_record(name, "full", 1.0, answer=full, score=1.0))
        records.append(make_record(name, "m", answer=own, score=float(full == own), kl=at / 10))
    _, row = summarise(ProbeSet("copies", 700, kinds), records)
    assert (row["n"], row["rate"], row["kinds"]) == (3, 1 / 3, {"number": 0.5, "count": 0})
    assert (row["rate_low"], row["rate_high"]) == wilson(1 / 3, 3)
    assert (row["kl"], row["kl_worst"]) == (pytest.approx(0.1), 0.2)
    assert row["differs_in_copy"] == 0.5  # a number that is counted is no copy
    alone = ProbeSet("aggregation", 700, {"count": kinds["count"]})
    assert summarise(alone, records[4:])[1]["differs_in_copy"] is None


def test_wilsons_interval():
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert wilson(1, 10) == pytest.approx((0.7225, 1), abs=1e-4)
