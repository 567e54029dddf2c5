"""``ragkv check``: check the invariants on a model, and its quality."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ragkv.cli.console import err, out, say_json
from ragkv.cli.options import AsJson, Device, DType, ModelName, Ratio
from ragkv.cli.session import open_engine
from ragkv.config import MEMORY
from ragkv.errors import ConfigError
from ragkv.report.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragkv.engine.quality import Quality

_YES_OR_NO = {True: "[green]yes[/]", False: "[red]no[/]"}


def check(
    model: ModelName = None,
    quality: Annotated[
        bool, typer.Option("--quality", help="Also measure the ratio that the model needs.")
    ] = False,
    ratio: Ratio = None,
    device: Device = None,
    dtype: DType = None,
    as_json: AsJson = False,
) -> None:
    """Run the invariants on the model; exit code 1 if one, or the ratio's quality, fails."""
    from ragkv.engine.quality import measure
    from ragkv.engine.verify import check_model
    from ragkv.model.loaded import ReusableModel

    if ratio is not None and not quality:
        raise ConfigError("--ratio has no effect without --quality: omit it")
    with open_engine(
        model, store=MEMORY, namespace="check", on_unsupported="full", device=device, dtype=dtype
    ) as kv:
        name, found = kv.info.name, []
        with err.status("Comparing with full prefill …"):
            rows = check_model(kv.loaded)
        holds = all(row.holds for row in rows)
        if quality and holds and isinstance(kv.loaded, ReusableModel):
            with err.status("Answering from reused chunks …"):
                found = measure(kv.loaded, kv.reuse.recompute_ratio if ratio is None else ratio)
            holds = found[0].holds
    if as_json:
        report = {"model": name, "holds": holds, "checks": [asdict(row) for row in rows]}
        probed = [asdict(each) | {"kept": each.kept, "holds": each.holds} for each in found]
        say_json(report | ({"quality": probed} if quality else {}))
    else:
        table = Table("what", "holds", "detail", title=escape(name))
        for row in rows:
            table.add_row(escape(row.name), _YES_OR_NO[row.holds], escape(row.detail))
        out.print(table)
        if quality:
            _show(escape(name), found)
    if not holds:
        raise typer.Exit(1)


def _show(name: str, found: Sequence[Quality]) -> None:
    if not found:
        out.print("Quality was not measured, because a check above failed.")
        return
    first, last = found[0], found[-1]
    table = Table("ratio", "holds", "copies", "kept", "agreement")
    for each in found:
        kept = "too few" if each.kept is None else f"{each.kept:.0%}"
        shares = f"{each.copies}/{each.examples}", kept, f"{each.agreement:.0%}"
        table.add_row(f"{each.ratio}", _YES_OR_NO[each.holds], *shares)
    out.print(table)
    out.print(
        f"{count(first.examples, 'prompt')}; full attention copies "
        f"{count(first.full_copies, 'record')}."
    )
    if first.kept is None:
        out.print("There are too few records to judge copying: only the agreement counts.")
    needs = f"a ratio of {last.ratio}" if last.holds else 'full prefill (method="full")'
    out.print(f"{name} keeps its answers." if first.holds else f"{name} needs {needs}.")
