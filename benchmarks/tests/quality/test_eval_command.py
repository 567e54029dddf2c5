"""``ragkv eval`` from its options to table and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from evaluations import load_tiny_models, run_eval, small_data
from rich.console import Console

from ragkv.errors import ConfigError
from ragkv_bench.data.examples import write_data
from ragkv_bench.quality.records import records_path
from ragkv_bench.quality.summary import Evaluation, SummaryRow, table


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    """Let the command load a tiny model whatever it is asked for."""
    load_tiny_models(monkeypatch)


def test_data_to_table_and_json(tmp_path):
    path, out = tmp_path / "d.jsonl", tmp_path / "e.json"
    write_data(path, small_data(3).examples)
    result = run_eval("--data", path, "--methods", "reuse, prophetkv, query", "--ratio", "0.1,auto", "--limit", 2,
                  "--json", out)  # fmt: skip
    assert result.exit_code == 0
    for words in ("on d, 2 examples", "prophetkv 0.1", "query auto", "reuse"):
        assert words in result.output
    assert [(row["method"], row["ratio"]) for row in json.loads(out.read_text())["rows"]] == [
        ("full", 1),
        ("reuse", 0),
        ("prophetkv", 0.1),
        ("query", 0.1),
        ("query", "auto"),
    ]
    assert (tmp_path / "e.rows.jsonl").exists()


DATA, NEEDLES = ("--data", "d.jsonl"), ("--needles", "single")
REFUSED = [
    ((*DATA, "--tokens", 512), "--tokens changes nothing without --needles"),
    ((), "give one of --data"),
    ((*DATA, *NEEDLES), "give one of --data"),
    ((*NEEDLES, "--json", "no/e.json"), "there is no folder"),
    ((*NEEDLES, "--json", "."), "is a folder: give a file"),
    (("--needles", "triple"), "needle kind must be one of"),
    (("--needles", ","), "takes single"),
    ((*NEEDLES, "--tokens", 700, "--limit", 1, "--ratio", "a"), "--ratio takes numbers"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED)
def test_what_does_not_fit_together_is_refused(arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=named):
        run_eval(*arguments)


def test_results_whose_names_differ_behind_a_dot_have_their_own_measurements(tmp_path):
    names = [records_path(tmp_path / name).name for name in ("m-3.1.json", "m-3.2.json", "m-3.1")]
    assert names == ["m-3.1.rows.jsonl", "m-3.2.rows.jsonl", "m-3.1.rows.jsonl"]


def test_needles_are_built_over_any_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A plain sentence stands here. " * 50)
    out = tmp_path / "n.json"
    run_eval("--needles", "single, multiquery,single", "--tokens", 700, "--haystack", text, "--limit", 1,
         "--methods", "reuse", "--json", out)  # fmt: skip
    saved = json.loads(out.read_text())
    assert (saved["data"], saved["examples"]) == ("needles-single-multiquery-700", 2)
    assert len((tmp_path / "n.rows.jsonl").read_text().splitlines()) == 2 * 2
    assert saved["rows"][1]["ci95"].keys() >= {"kl"}


def test_an_interruption_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("ragkv_bench.quality.run.evaluate", interrupt)
    path = tmp_path / "d.jsonl"
    write_data(path, small_data(1).examples)
    result = run_eval("--data", path, "--json", tmp_path / "e.json")
    assert result.exit_code == 130
    assert "goes on from here" in result.output


def _evaluation():
    def row(method, ratio, share, kl, kept):
        return SummaryRow(
            method, ratio, 0.5, kept, kl, 0.9, share, 1.0, 2.0, {"kl": (kl / 2, kl * 2)}
        )

    rows = [row("full", 1.0, 1.0, 0.0, 1.0), row("prefix", 0.0, 0.9, 1e-13, 1.0)]
    for i in range(9):
        rows += [
            row(f"m{i}", r, r, (i + 1) * 0.05 / r, None if i == 8 else 0.9) for r in (0.2, 0.1)
        ]
    return Evaluation("/a/long/folder" * 20 + "/model", "data", 5, tuple(rows))


def test_ratios_0_and_1_are_named_beside_others():
    zero, part, one = (SummaryRow("query", r, 0, 0, 0, 1, r, 1, 1) for r in (0.0, 0.2, 1.0))
    reuse = replace(zero, method="reuse")
    shown = table(Evaluation("m", "d", 1, (zero, part, one, reuse)))
    assert list(shown.columns[0].cells) == ["query 0", "query 0.2", "query 1", "reuse"]


def test_the_table_fits_80_columns(capsys):
    console = Console(width=80, force_terminal=False)
    console.print(table(_evaluation()))
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert re.search(r"m0 0\.2 +20% +0\.250 +90% +0\.500 +90% +1\.00 +2\.0x", shown)
    assert "0.125-0.500" in shown
