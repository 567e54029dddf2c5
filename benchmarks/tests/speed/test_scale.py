"""``ragkv bench scale``: many chunks with empty entries, in a process of their own."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from ragkv_bench.commands import bench
from ragkv_bench.speed.scale import ScalePlan, bench_scale


def test_figures_of_each_number_of_chunks(tmp_path):
    plan = ScalePlan((50, 400), rounds=2)
    found = bench_scale(plan, tmp_path)
    few, many = found["rows"]
    assert (few["chunks"], many["chunks"]) == (50, 400)
    assert many["index_mb"] > few["index_mb"] > 0
    assert all(value > 0 for row in found["rows"] for value in row.values())


def test_the_command_writes_its_figures(tmp_path):
    path = tmp_path / "scale.json"
    options = ["scale", "--chunks", "60", "--rounds", "1", "--json", str(path)]
    done = CliRunner().invoke(bench, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text())["rows"][0]["chunks"] == 60
