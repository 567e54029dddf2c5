"""``ragkv bench ingest``: what is timed, what is written, what is refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

import ragkv
from ragkv import RagKV
from ragkv.cli.main import app
from ragkv.errors import ConfigError
from ragkv_bench.speed.ingest import bench_ingest

Make = Callable[..., RagKV]


def test_both_see_the_same_tokens_and_nothing_is_left(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = make_engine()
    seen: list[tuple[int, ...]] = []

    def note(_: object, given: tuple[object, ...], named: dict[str, torch.Tensor]) -> None:
        seen.append(tuple(named["input_ids"].shape))

    hook = engine.loaded.model.register_forward_pre_hook(note, with_kwargs=True)
    found = bench_ingest(engine.loaded, chunks=3, chunk_tokens=50, rounds=2)
    hook.remove()
    assert abs(found["tokens"] - 150) <= 3
    assert engine.loaded.architecture is not None
    assert found["bytes_per_token"] > 4 * engine.loaded.architecture.values_per_token
    # each round: the model alone, then ingestion; the sink once, before the first
    assert len([shape for shape in seen if shape[0] == 3]) == 6
    assert len(set(seen)) == 2
    assert len(seen) == 7
    rate = found["ingest_tokens_s"] / found["prefill_tokens_s"]
    assert found["share"] == pytest.approx(rate, rel=0.5)
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ragkv.RagKV
    monkeypatch.setattr(
        ragkv, "RagKV", lambda _, **given: real(tiny_model(), tiny_tokenizer(), **given)
    )
    path = tmp_path / "i.json"
    options = ("--chunks", "2", "--chunk-tokens", "40", "--rounds", "1")
    done = CliRunner().invoke(app, ["bench", "ingest", *options, "--json", str(path)])
    assert done.exit_code == 0, done.output
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert abs(saved["tokens"] - 80) <= 2
    assert saved["quartiles"] == [saved["share"]] * 2


def test_what_is_refused(make_engine: Make) -> None:
    loaded = make_engine().loaded
    with pytest.raises(ConfigError, match="at least 1"):
        bench_ingest(loaded, chunks=0)
    with pytest.raises(ConfigError, match="too few"):
        bench_ingest(loaded, chunks=10_000)
