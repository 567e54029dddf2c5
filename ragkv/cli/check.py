"""``ragkv check``: run the invariants on a model."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.markup import escape
from rich.table import Table

from ragkv.cli.console import err, out, say_json
from ragkv.cli.options import AsJson, Device, DType, ModelName
from ragkv.cli.session import open_engine
from ragkv.config import MEMORY


def check(
    model: ModelName = None,
    device: Device = None,
    dtype: DType = None,
    as_json: AsJson = False,
) -> None:
    """Run the invariants on the model; exit code 1 if a required one fails."""
    from ragkv.engine.verify import check_model

    with open_engine(
        model, store=MEMORY, namespace="check", on_unsupported="full", device=device, dtype=dtype
    ) as kv:
        with err.status("Comparing with full prefill …"):
            rows = check_model(kv.loaded)
        name = kv.info.name
    holds = all(row.holds for row in rows if row.required)
    if as_json:
        say_json({"model": name, "holds": holds, "checks": [asdict(row) for row in rows]})
    else:
        table = Table("what", "holds", "detail", title=escape(name))
        for row in rows:
            no = "[red]no[/]" if row.required else "no, and need not"
            table.add_row(
                escape(row.name), "[green]yes[/]" if row.holds else no, escape(row.detail)
            )
        out.print(table)
    if not holds:
        raise typer.Exit(1)
