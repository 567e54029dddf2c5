"""Options that several of these commands share, and what is read from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.options import Device, DType, check_folders
from ragkv.errors import ConfigError

__all__ = ["DType", "Device", "check_folders"]

Data = Annotated[Path, typer.Option(help="JSONL of examples; its form: docs/evaluation.md.")]
Model = Annotated[str | None, typer.Option(help="Hub name or folder; default: the embedded model.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many examples.")]
Strict = Annotated[
    bool, typer.Option("--strict/--no-strict", help="Stop at bad lines, or skip them.")
]
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--fresh",
        help="Add to a complete run's measurements, or start over.",
        show_default="interrupted runs are resumed",
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Draw the picture here (.png, .svg).")]
Chart = Annotated[Path | None, typer.Option(help="Measure nothing: show and draw this saved JSON.")]
AuxiliaryModel = Annotated[
    str | None, typer.Option(help="Scores tokens for cacheclip; default: the embedded model.")
]


def refuse(context: typer.Context, useless: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for options on the command line that change nothing, by where that is."""
    for where, names in useless.items():
        for parameter in context.command.params:
            name = str(parameter.name)
            source = context.get_parameter_source(name)
            if name in names and source is not None and source.name == "COMMANDLINE":
                raise ConfigError(f"{parameter.opts[0]} changes nothing {where}: omit it")


def parts_of(text: str) -> list[str]:
    """Return the parts of a comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]
