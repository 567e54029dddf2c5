"""Results: kept in one JSON file each, shown as a table for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ragkv.errors import ConfigError

Found = dict[str, Any]
"""What a command writes as JSON, or one of its rows."""
Row = TypeVar("Row")


def short_name(model: str) -> str:
    """Return the model as titles name it: a hub name, or a folder without the way to it."""
    path = Path(model)
    return path.name if path.is_absolute() else model


def write(path: str | Path, value: Found) -> None:
    """Write a JSON file for people to look into, too.

    Raises ConfigError: it cannot be written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def table(
    title: str,
    caption: str,
    rows: Iterable[Row],
    columns: Mapping[str, Callable[[Row], str]],
    *,
    words: int = 1,
) -> Table:
    """Return a table of 80 columns' width: a line a row, cells made by the column's function.

    The first ``words`` columns are aligned left. Brackets in the title are text; in cells they are
    rich's markup.
    """
    shown = Table(
        title=escape(title),
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, heading in enumerate(columns):
        shown.add_column(heading, justify="left" if index < words else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(cell(row) for cell in columns.values()))
    return shown


def cell(value: float | None, form: str, unit: str = "") -> str:
    """Return a figure as a format shows it; ``-`` where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def of(name: str, form: str = "", unit: str = "") -> Callable[[Found], str]:
    """Return a column's function: the row's value of that name, in a format."""
    return lambda row: cell(row[name], form, unit)


def grey(ends: tuple[float, float], form: str) -> str:
    """Return an interval, or quartiles, in grey."""
    return f"[bright_black]{'-'.join(format(end, form) for end in ends)}[/]"
