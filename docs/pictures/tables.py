"""Write the tables of the pages from ``benchmarks/results``, and under each where it was measured.

A table stands between ``<!-- table: NAME | COLUMN | COLUMN | where COLUMN = CELL or CELL -->`` and
``<!-- end -->``. Without columns it has those that the file says are ``shown``, without ``where``
all rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Result:
    """Figures, and where they were measured: a file of ``benchmarks/results``."""

    command: str
    machine: str
    commit: str
    n: str
    model: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""
    shown: list[str] = field(default_factory=list)

    def records(self, **where: Any) -> list[dict[str, Any]]:
        """Return each row as a dictionary by column: those whose cells are as ``where`` says."""
        found = (dict(zip(self.columns, row, strict=True)) for row in self.rows)
        return [row for row in found if where.items() <= row.items()]


def result_of(name: str) -> Result:
    """Return a result by the name of its file."""
    return Result(**json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def table(marker: str) -> str:
    """Return the table that a marker asks for, and its line of provenance.

    Raises
    ------
    KeyError
        If the result has no such column.
    ValueError
        If no row has the cells that the marker asks for.
    """
    name, *parts = (part.strip() for part in marker.split("|"))
    result = result_of(name)
    columns = [part for part in parts if not part.startswith("where ")]
    columns = columns or result.shown or result.columns
    records = result.records()
    for part in parts:
        if part.startswith("where "):
            column, _, cells = part.removeprefix("where ").partition(" = ")
            records = [row for row in records if str(row[column]) in cells.split(" or ")]
    if not records:
        raise ValueError(f"{name}.json has no row for: {marker}")
    rows = [columns, *([str(row[column]) for column in columns] for row in records)]
    head, *lines = [f"|{'|'.join(row)}|" for row in rows]
    return "\n".join([head, "|" + "---|" * len(columns), *lines, "", provenance(result)])


def provenance(result: Result) -> str:
    """Return in one line what measured a result, on which machine, at which commit."""
    command = result.command
    command = f"`{command}`" if command != "not recorded" else f"Command {command}"
    where = f"{result.machine}; commit {result.commit}; n: {result.n}; {result.model}"
    return f"<small>{command}; {where}.</small>"


def with_tables(text: str) -> str:
    """Return a page's text with each of its tables written again."""
    return TABLE.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", text)


def pages(root: Path = ROOT) -> Iterator[Path]:
    """Yield the pages that may have tables."""
    yield root / "README.md"
    yield from sorted((root / "docs").glob("*.md"))


def main(root: Path = ROOT) -> None:
    """Write every table of every page again."""
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        page.write_text(with_tables(text), encoding="utf-8")


if __name__ == "__main__":
    main()
