"""Options that several of these commands share, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import err, out
from ragkv.cli.options import Device, DType, check_folders
from ragkv.config import MEMORY
from ragkv.errors import ConfigError
from ragkv_bench.results import check_picture

if TYPE_CHECKING:
    from ragkv import RagKV
    from ragkv_bench.data.examples import DataSet
    from ragkv_bench.quality.records import Ratio

__all__ = ["DType", "Device"]

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


def check_places(*files: Path | None, plot: Path | None = None) -> None:
    """Raise ConfigError before the work where a result has no place to go to."""
    check_folders(*files, plot)
    check_picture(plot)


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


def ratios_of(text: str) -> list[Ratio]:
    """Return the ratios of a comma-separated option."""
    try:
        return ["auto" if part == "auto" else float(part) for part in parts_of(text)]
    except ValueError as error:
        raise ConfigError(f"--ratio takes numbers such as 0.1,0.2 or auto, not {text!r}") from error


def read_examples(path: Path, *, strict: bool) -> DataSet:
    """Read a data set; the skipped lines are named on the standard error."""
    from ragkv_bench.data.examples import read_data

    data = read_data(path, strict=strict)
    for problem in data.problems:
        err.print(f"skipped: {problem}", markup=False, highlight=False, soft_wrap=True)
    return data


def engine(
    model: str | None,
    auxiliary_model: str | None = None,
    seed: int = 0,
    *,
    device: str | None,
    dtype: str | None,
) -> RagKV:
    """Return an engine whose chunks are in memory alone."""
    from ragkv import RagKV, ReuseConfig

    reuse = ReuseConfig(auxiliary_model=auxiliary_model, seed=seed)
    return RagKV(model, store=MEMORY, reuse=reuse, device=device, dtype=dtype)


@contextmanager
def interruptible(path: Path | None) -> Iterator[None]:
    """End the command with code 130 at Ctrl-C; a result that has a path can be continued."""
    try:
        yield
    except KeyboardInterrupt:
        if path is not None:
            out.print("Interrupted. The same command goes on from here.")
        raise typer.Exit(130) from None
