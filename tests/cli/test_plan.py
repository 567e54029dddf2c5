"""`ragkv plan`: bytes by codec off the configuration, and where loading breaks even."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from tiny import tiny_model
from transformers import MambaConfig
from typer.testing import CliRunner

from ragkv.cli.main import app


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration and no weights: 8 layers, 2 KV heads of 64, bfloat16."""
    config = tiny_model("qwen3").config
    config.num_hidden_layers, config.head_dim = 8, 64
    config.layer_types = ["full_attention"] * 8
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--model", str(folder), *arguments])


def plan(folder: Path, *arguments: str) -> Any:
    result = run(folder, "--prefill-tps", "1000", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_bytes_are_read_off_the_configuration(folder):
    found = plan(folder)
    raw = 2 * 8 * 2 * 64 * 2
    sizes = {row["codec"]: row["bytes_per_token"] for row in found["codecs"]}
    assert found["dtype"] == "bfloat16"
    assert sizes["raw"] == raw + 12
    assert 0.5 * raw < sizes["int8"] < 0.6 * raw
    assert 0.25 * raw < sizes["int4"] < 0.35 * raw
    assert plan(folder, "--dtype", "float32")["codecs"][0]["bytes_per_token"] == 2 * raw + 12


def test_where_loading_breaks_even(folder):
    arguments = ("--chunks", "10", "--tokens", "500")
    found = plan(folder, *arguments, "--disk-gbps", "0.001")
    assert (found["compute_s"], found["ingestion_s"]) == (0.5, 5.0)
    assert [row["codec"] for row in found["codecs"]] == ["raw", "int8", "int4"]
    for place, row in enumerate(found["codecs"]):
        assert row["total_bytes"] == pytest.approx(10 * 500 * row["bytes_per_token"])
        assert row["load_s"] == pytest.approx(500 * row["bytes_per_token"] / 1e6)
        assert row["loading_wins"] == (row["load_s"] < 0.5) == (row["break_even_gbps"] < 0.001)
        even = plan(folder, *arguments, "--disk-gbps", str(row["break_even_gbps"]))
        assert even["codecs"][place]["load_s"] == pytest.approx(even["compute_s"])


def test_the_table_and_what_is_wrong(folder):
    result = run(folder, "--prefill-tps", "1000")
    assert result.exit_code == 0, result.output
    assert "loading wins" in result.stdout.replace("\n", " ")
    for wrong in (("--disk-gbps", "0"), ("--disk-gbps", "nan"), ("--prefill-tps", "inf")):
        result = run(folder, "--prefill-tps", "1000", *wrong)
        assert (result.exit_code, wrong[0] in result.stderr) == (2, True)


def test_what_has_no_caches_has_no_plan(tmp_path):
    result = run(tmp_path / "nowhere", "--prefill-tps", "1000")
    assert (result.exit_code, "no folder" in result.stderr) == (2, True)
    MambaConfig().save_pretrained(tmp_path)
    result = run(tmp_path, "--prefill-tps", "1000")
    assert (result.exit_code, "does not determine" in result.stderr) == (2, True)
