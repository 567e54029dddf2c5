"""The sizes that the project keeps to: lines of each room, settings, commands, words of docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

import ragkv.config
from ragkv.cli.main import app
from ragkv.serve.config import ServeConfig

ROOT = Path(__file__).parents[2]
# Raising a figure is a commit of its own, whose message says which user gets what from it.
LINES = {
    "ragkv/answer": 430,
    "ragkv/attend": 2090,
    "ragkv/chunk": 300,
    "ragkv/cli": 1610,
    "ragkv/client": 910,
    "ragkv/config": 2070,
    "ragkv/decode": 1360,
    "ragkv/engine": 5110,
    "ragkv/ingest": 300,
    "ragkv/model": 2870,
    "ragkv/prompt": 2220,
    "ragkv/recompute": 600,
    "ragkv/report": 1230,
    "ragkv/retrieve": 300,
    "ragkv/select": 1020,
    "ragkv/serve": 2720,
    "ragkv/splice": 1000,
    "ragkv/store": 6120,
    "ragkv/vllm": 840,
    "benchmarks/ragkv_bench": 6650,
    "benchmarks/tests": 3890,
    "examples": 800,
    "integrations": 3960,
    "kernels": 3200,
    "tests": 42610,
}
LIMITS = ("max_running", "kv_bytes")
"""Settings that are arguments of RagKV."""
COUNTS = {"settings": 49, "commands": 9, "words of docs": 21_100, "words of tutorials": 1_800}


def lines_of(room: str) -> int:
    files = (ROOT / room).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def settings() -> list[str]:
    """Return the fields of all classes of settings."""
    public = [*vars(ragkv.config).values(), ServeConfig]
    classes = [each for each in public if isinstance(each, type) and is_dataclass(each)]
    return [*LIMITS, *(field.name for each in classes for field in fields(each))]


def commands(group: Any) -> Iterator[str]:
    for name, command in group.commands.items():
        yield from commands(command) if hasattr(command, "commands") else [name]


def words_of_docs() -> int:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def words_of_tutorials() -> int:
    notebooks = (json.loads(path.read_text("utf-8")) for path in (ROOT / "docs").rglob("*.ipynb"))
    texts = [cell for each in notebooks for cell in each["cells"] if cell["cell_type"] != "code"]
    return sum(len("".join(cell["source"]).split()) for cell in texts)


def check(what: str, size: int, budget: int) -> None:
    assert size <= budget, f"{what}: {size} instead of {budget}: what does this make superfluous?"


@pytest.mark.parametrize("room", LINES)
def test_lines(room: str):
    check(room, lines_of(room), LINES[room])


def test_every_room_has_a_budget():
    rooms = {f"ragkv/{path.name}" for path in (ROOT / "ragkv").iterdir() if lines_of(str(path))}
    assert rooms <= LINES.keys()


def test_every_setting_is_on_the_page_of_settings():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert not [each for each in settings() if f"`{each}`" not in page]


def test_counts():
    check("settings", len(settings()), COUNTS["settings"])
    check("commands", len(list(commands(typer.main.get_command(app)))), COUNTS["commands"])
    check("words of docs", words_of_docs(), COUNTS["words of docs"])
    check("words of tutorials", words_of_tutorials(), COUNTS["words of tutorials"])
