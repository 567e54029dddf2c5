"""Options that several of these commands share, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import out
from ragkv.cli.options import Device, DType, check_folders
from ragkv.config import MEMORY
from ragkv.errors import ConfigError
from ragkv_bench.results import Found, write

if TYPE_CHECKING:
    from rich.table import Table

    from ragkv import RagKV
    from ragkv_bench.quality.records import Ratio

__all__ = ["DType", "Device", "check_folders"]

Data = Annotated[Path, typer.Option(help="JSONL of examples; its form: docs/evaluation.md.")]
Model = Annotated[str | None, typer.Option(help="Hub name or folder; default: the embedded model.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many examples.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Write the result here.")]
AuxiliaryModel = Annotated[
    str | None, typer.Option(help="Scores tokens for cacheclip; default: the embedded model.")
]


def finish(found: Found, tables: Iterable[Table], json_path: Path | None) -> None:
    """Write a result to its file, and print its tables."""
    if json_path is not None:
        write(json_path, found)
    for each in tables:
        out.print(each)


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


def engine(
    model: str | None,
    auxiliary_model: str | None = None,
    *,
    device: str | None,
    dtype: str | None,
) -> RagKV:
    """Return an engine whose chunks are in memory alone."""
    from ragkv import RagKV, ReuseConfig

    reuse = ReuseConfig(auxiliary_model=auxiliary_model)
    return RagKV(model, store=MEMORY, reuse=reuse, device=device, dtype=dtype)


def lengths_of(text: str | None) -> list[int]:
    """Return the lengths, in tokens, of a comma-separated option; none where it is not given."""
    found = [int(part) if part.isdecimal() else 0 for part in parts_of(text or "")]
    if text is not None and (not found or min(found) < 1):
        raise ConfigError(f"--tokens takes lengths such as 4096,8192, not {text!r}")
    return found


@contextmanager
def interruptible(path: Path | None) -> Iterator[None]:
    """End the command with code 130 at Ctrl-C; a result that has a path can be continued."""
    try:
        yield
    except KeyboardInterrupt:
        if path is not None:
            out.print("Interrupted. The same command goes on from here.")
        raise typer.Exit(130) from None
