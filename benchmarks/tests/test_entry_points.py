"""The commands come with ragkv-bench, through what its installation wrote down."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragkv.cli.main import app

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
COMMANDS = PROJECT["project"]["entry-points"]["ragkv.commands"]


@pytest.mark.parametrize(
    "words",
    [[name] for name in COMMANDS if name != "bench"]
    + [["bench", name] for name in ("answer", "decode", "ingest", "serve", "ttft")],
    ids=" ".join,
)
def test_every_command_has_its_options(words):
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0, done.output
    assert f"Usage: ragkv {' '.join(words)} [OPTIONS]" in done.output.replace("root", "ragkv")


def test_the_installed_ones_are_these():
    """In a process of its own, where nothing stands for the installation."""
    try:
        distribution("ragkv-bench")
    except PackageNotFoundError:
        pytest.skip("ragkv-bench is not installed: make setup")
    code = "from ragkv.cli.main import app\napp(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f" {name} " in done.stdout for name in COMMANDS)
    assert "cannot be loaded" not in done.stderr
