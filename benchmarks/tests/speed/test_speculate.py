"""``ragkv bench speculate``: what is measured, what is written, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

import ragkv
from ragkv import RagKV
from ragkv.cli.main import app
from ragkv.errors import ConfigError
from ragkv_bench.speed.speculate import SpeculatePlan, bench_speculate

Make = Callable[..., RagKV]
SMALL = {"documents": 4, "chunks_per_prompt": 3, "chunk_tokens": 60, "requests": 4}


def test_each_question_is_asked_both_ways(make_engine: Make) -> None:
    plan = SpeculatePlan((0.2,), changed=0.5, **SMALL)
    (row,) = bench_speculate(make_engine().loaded, plan).rows
    assert row.requests == 4
    assert row.started == row.used + row.cancelled
    assert row.started == 6  # two results are not the first list
    assert row.used >= 2  # others had not begun
    assert row.ttft_s >= 0.2
    assert row.plain_ttft_s > 0.2
    assert row.overlap_s > 0
    assert row.wasted_s > 0


def test_nothing_changes(make_engine: Make) -> None:
    plan = SpeculatePlan((0.2,), changed=0.0, **SMALL)
    (row,) = bench_speculate(make_engine().loaded, plan).rows
    assert (row.started, row.used, row.cancelled, row.wasted_s) == (4, 4, 0, 0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ragkv.RagKV
    monkeypatch.setattr(
        ragkv, "RagKV", lambda _, **given: real(tiny_model(), tiny_tokenizer(), **given)
    )
    path = tmp_path / "s.json"
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    options = (*sizes, "--retrieval", "0.05,0", "--json", str(path))
    done = CliRunner().invoke(app, ["bench", "speculate", *options])
    assert done.exit_code == 0, done.output
    assert "speed-up" in done.output
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert [row["retrieval_s"] for row in saved["rows"]] == [0.05, 0]
    assert saved["setup"]["plan"]["documents"] == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"retrieval_s": ()},
        {"retrieval_s": (-1.0,)},
        {"requests": 0},
        {"changed": 2.0},
        {"chunks_per_prompt": 1},
        {"ratio": 2.0},
        {"method": "none such"},
    ],
)
def test_what_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SpeculatePlan(**wrong)
