"""``ragkv eval --codec``: codecs side by side on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import typer
from evaluations import small_data
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

import ragkv
from ragkv.errors import ConfigError, PromptTooLongError, UnknownMethodError
from ragkv_bench.commands.evaluate import evaluate_command
from ragkv_bench.data.tasks import TASKS
from ragkv_bench.quality import Chunk, DataSet, write_data
from ragkv_bench.quality.codecs import compare_codecs
from ragkv_bench.quality.run import evaluate

FIELDS = [
    "codec",
    "method",
    "ratio",
    "bytes_per_token",
    "load_s",
    "kl_raw",
    "kl",
    "agreement",
    "score",
    "retention",
]


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    for name in ("multihop_qa", "niah_single"):
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], max_new_tokens=4))


def test_codecs_stand_side_by_side(make_engine):
    kv = make_engine()
    found = compare_codecs(
        kv,
        small_data(2),
        ["int4", "int8", "int8+zstd", "int4"],
        methods=["query", "reuse"],
        ratios=[0.2],
    )
    assert (found.model, found.data, found.examples) == (kv.model_name, "mine", 2)
    rows = {(row.method, row.ratio, row.codec): row for row in found.rows}
    codecs = ["raw", "int4", "int8", "int8+zstd"]
    assert list(rows) == [(m, r, c) for m, r in (("query", 0.2), ("reuse", 0)) for c in codecs]
    for method, ratio in (("query", 0.2), ("reuse", 0)):
        raw, int4, int8, packed = (rows[method, ratio, codec] for codec in codecs)
        assert raw.kl_raw == 0
        assert 0 < int8.kl_raw < int4.kl_raw
        assert int8.kl_raw < 1e-3
        assert packed.kl_raw == pytest.approx(int8.kl_raw, rel=1e-6)
        assert int8.kl == pytest.approx(raw.kl, rel=0.1)
        assert raw.kl > 1e-4  # full attention is another matter
        # 2 kv heads of 16 in 4 layers, float32; the headers of such small entries are long
        assert raw.bytes_per_token > 2 * 4 * 2 * 16 * 4
        assert int4.bytes_per_token < int8.bytes_per_token < raw.bytes_per_token
        assert all(row.load_s > 0 for row in (raw, int4, int8, packed))
        assert raw.retention in (None, 1.0)
    (usual,) = (
        row for row in evaluate(kv, small_data(2), methods=["query"]).rows if row.method == "query"
    )
    assert rows["query", 0.2, "raw"].kl == pytest.approx(usual.kl, rel=1e-4)
    assert rows["query", 0.2, "raw"].score == usual.score


def test_everything_computed_again_is_the_same_in_every_codec(make_engine):
    found = compare_codecs(make_engine(), small_data(1), ["int4"], methods=["query"], ratios=[1])
    assert [row.kl_raw for row in found.rows] == pytest.approx([0, 0], abs=1e-6)
    assert [row.agreement for row in found.rows] == [1, 1]


def test_what_cannot_be_compared_is_refused(make_engine):
    kv = make_engine()
    for methods, codecs, words in (
        (["prefix"], ["int4"], "method prefix stores no chunks"),
        (["full"], ["int4"], "method full stores no chunks"),
        (["query"], ["int3"], "codec must be one of"),
        ([], ["int4"], "name at least one method"),
    ):
        with pytest.raises(ConfigError, match=words):
            compare_codecs(kv, small_data(1), codecs, methods=methods)
    with pytest.raises(UnknownMethodError):
        compare_codecs(kv, small_data(1), ["int4"], methods=["nonsense"])
    (example,) = small_data(1).examples
    short = DataSet("short", (replace(example, chunks=(Chunk("Ada."),)),))
    with pytest.raises(ConfigError, match="no chunk of short is long enough"):
        compare_codecs(kv, short, ["int4"], methods=["query"])
    with pytest.raises(ConfigError, match="no example"):
        compare_codecs(kv, DataSet("none", ()), ["int4"], methods=["query"])


def test_a_prompt_that_is_too_long_stops_or_is_left_out(make_engine, caplog):
    kv, data = make_engine(), small_data(2)
    long = replace(data.examples[0], question="why " * 4096)
    mixed = DataSet("mixed", (long, data.examples[1]))
    with pytest.raises(PromptTooLongError):
        compare_codecs(kv, mixed, ["int8"], methods=["reuse"])
    found = compare_codecs(kv, mixed, ["int8"], methods=["reuse"], strict=False)
    assert found.examples == 1
    assert "example x_0 is skipped" in caplog.text
    with pytest.raises(ConfigError, match="no example of long fits"):
        compare_codecs(kv, DataSet("long", (long,)), ["int8"], methods=["reuse"], strict=False)


def _run(monkeypatch, *arguments):
    real = ragkv.RagKV
    monkeypatch.setattr(
        ragkv,
        "RagKV",
        lambda model, **kwargs: real(
            *(
                (model,)
                if isinstance(model, ragkv.model.load.LoadedModel)
                else (tiny_model(), tiny_tokenizer())
            ),
            **kwargs,
        ),
    )
    app = typer.Typer()
    app.command()(evaluate_command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, Exception):
        raise result.exception
    return result


def test_the_command_prints_a_table_and_writes_json(tmp_path, monkeypatch):
    path, out = tmp_path / "d.jsonl", tmp_path / "e.json"
    write_data(path, small_data(2).examples)
    result = _run(monkeypatch, "--data", path, "--limit", 1, "--methods", "reuse",
                  "--codec", "int8, int4+zstd", "--json", out)  # fmt: skip
    assert result.exit_code == 0
    for words in ("on d, 1 examples", "raw", "int8", "int4+zstd", "KL raw", "load ms"):
        assert words in result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    saved = json.loads(out.read_text())
    assert list(saved) == ["model", "data", "examples", "rows"]
    assert [row["codec"] for row in saved["rows"]] == ["raw", "int8", "int4+zstd"]
    assert [list(row) for row in saved["rows"]] == [FIELDS] * 3
    with pytest.raises(ConfigError, match="codec must be one of"):
        _run(monkeypatch, "--data", path, "--codec", "int5")
    with pytest.raises(ConfigError, match="--codec draws no picture"):
        _run(monkeypatch, "--data", path, "--codec", "int8", "--plot", tmp_path / "p.png")
