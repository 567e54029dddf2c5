"""The sizes that the project keeps to: code of each room, settings, commands, words."""

import ast
import io
import json
import tokenize
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

import ragkv.config
from ragkv import ReuseReport
from ragkv.cli.main import app
from ragkv.serve.config import ServeConfig

ROOT = Path(__file__).parents[2]
# Lines of code: without docstrings, comments and blank lines. A room may only shrink: a commit that
# raises a figure says which user gets what from it.
CODE = {
    "ragkv/answer": 436,
    "ragkv/attend": 1296,
    "ragkv/chunk": 237,
    "ragkv/cli": 1143,
    "ragkv/client": 570,
    "ragkv/config": 1072,
    "ragkv/decode": 815,
    "ragkv/engine": 2188,
    "ragkv/explain": 306,
    "ragkv/history": 634,
    "ragkv/ingest": 445,
    "ragkv/model": 2186,
    "ragkv/prompt": 1445,
    "ragkv/recompute": 293,
    "ragkv/report": 694,
    "ragkv/retrieve": 73,
    "ragkv/schedule": 288,
    "ragkv/select": 505,
    "ragkv/serve": 1557,
    "ragkv/splice": 625,
    "ragkv/store": 3154,
    "ragkv/workers": 110,
    "benchmarks/ragkv_bench": 4708,
    "benchmarks/tests": 3085,
    "examples": 547,
    "integrations": 5882,
    "kernels": 2417,
    "tests": 31728,
}
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
"""Tokens that are no code."""
LIMITS = ("max_running", "kv_bytes")
"""Settings that are arguments of RagKV."""
COUNTS = {
    "settings": 42,
    "fields of a report": 24,
    "commands": 9,
    "words of docs": 21_050,
    "words of tutorials": 1_800,
}
"""The log of experiments has no limit of words."""


def code_lines(path: Path) -> int:
    """Count the lines of a file that have code."""
    source, lines = path.read_text(encoding="utf-8"), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def code_of(room: str) -> int:
    return sum(map(code_lines, (ROOT / room).rglob("*.py")))


def settings() -> list[str]:
    """Return the fields of all classes of settings."""
    public = [*vars(ragkv.config).values(), ServeConfig]
    classes = [each for each in public if isinstance(each, type) and is_dataclass(each)]
    return [*LIMITS, *(field.name for each in classes for field in fields(each))]


def leaves(kind: Any) -> Iterator[str]:
    """Yield the fields of a report and of its parts, without its trace."""
    types = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(types[field.name]):
            yield from leaves(types[field.name])
        elif field.name != "trace":
            yield field.name


def commands(group: Any) -> Iterator[str]:
    for name, command in group.commands.items():
        yield from commands(command) if hasattr(command, "commands") else [name]


def words_of_docs() -> int:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text("utf-8").split()) for page in pages if page.stem != "log")


def words_of_tutorials() -> int:
    notebooks = (json.loads(path.read_text("utf-8")) for path in (ROOT / "docs").rglob("*.ipynb"))
    texts = [cell for each in notebooks for cell in each["cells"] if cell["cell_type"] != "code"]
    return sum(len("".join(cell["source"]).split()) for cell in texts)


def check(what: str, size: int, budget: int) -> None:
    assert size <= budget, f"{what}: {size} instead of {budget}: what does this make superfluous?"


@pytest.mark.parametrize("room", CODE)
def test_code(room):
    check(room, code_of(room), CODE[room])


def test_every_room_has_a_budget():
    rooms = {f"ragkv/{path.name}" for path in (ROOT / "ragkv").iterdir() if code_of(str(path))}
    assert rooms <= CODE.keys()


def test_counts():
    check("settings", len(settings()), COUNTS["settings"])
    check("fields of a report", len(list(leaves(ReuseReport))), COUNTS["fields of a report"])
    check("commands", len(list(commands(typer.main.get_command(app)))), COUNTS["commands"])
    check("words of docs", words_of_docs(), COUNTS["words of docs"])
    check("words of tutorials", words_of_tutorials(), COUNTS["words of tutorials"])
