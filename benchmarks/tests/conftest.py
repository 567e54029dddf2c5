"""``ragkv`` has the commands that are written in this folder's ``pyproject.toml``, installed or not."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from ragkv.cli import plugins

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
COMMANDS = PROJECT["project"]["entry-points"][plugins.COMMANDS]


@pytest.fixture(autouse=True)
def _commands(monkeypatch):
    found = EntryPoints(
        EntryPoint(name, value, plugins.COMMANDS) for name, value in COMMANDS.items()
    )
    monkeypatch.setattr(plugins, "entry_points", found.select)
