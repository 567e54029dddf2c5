"""``ragkv plan``: what a corpus takes, and whether loading it is going to pay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ragkv.cli.console import err, out, say_json
from ragkv.cli.options import AsJson, ModelName
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ragkv.measure.capacity.plan import CapacityPlan
    from ragkv.store.tiers.costs import CostTable


def plan_command(
    model: ModelName = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the corpus.")] = 10_000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 400,
    disk_gbps: Annotated[
        float, typer.Option(help="What the store delivers, in 1e9 bytes a second.")
    ] = 2.0,
    prefill_tps: Annotated[
        float | None,
        typer.Option(
            help="Tokens a second that the model computes.",
            show_default="measured: the model is loaded for it",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="The model's dtype.", show_default="its configuration's"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a corpus's size by codec, its ingestion time, and where loading breaks even."""
    for name, value in (("--disk-gbps", disk_gbps), ("--prefill-tps", prefill_tps)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be a number above 0, not {value:g}")
    from ragkv.measure.capacity.plan import plan, shape_of
    from ragkv.model.load import dtype_of
    from ragkv.store.tiers.costs import CostTable

    shape = shape_of(model, dtype_of(dtype))
    if prefill_tps is None:
        err.print("Measuring prefills; --prefill-tps N does without.", highlight=False)
        costs = _measured(model, shape.dtype)
    else:
        costs = CostTable.at_rate(prefill_tps)
    found = plan(shape, chunks=chunks, tokens=tokens, disk_gbps=disk_gbps, costs=costs)
    if as_json:
        say_json({**found.to_dict(), "costs": costs.to_dict()})
    else:
        _show(found)


def _measured(model: str | None, dtype: torch.dtype) -> CostTable:
    from ragkv.model.load import load_model
    from ragkv.store.tiers.costs import measure_costs

    return measure_costs(load_model(model, None, dtype=dtype, on_unsupported="full"))


def _show(found: CapacityPlan) -> None:
    table = Table("codec", "bytes/token", "store GB", "load ms", "compute ms", "loading wins above")
    for row in found.codecs:
        table.add_row(
            row.codec,
            f"{row.bytes_per_token:,.0f}",
            f"{row.total_bytes / 1e9:,.2f}",
            f"{row.load_s * 1e3:,.1f}",
            f"{found.compute_s * 1e3:,.1f}",
            f"{row.break_even_gbps:,.2f} GB/s",
            style=None if row.loading_wins else "dim",
        )
    out.print(table)
    out.print(
        f"{found.model} in {found.dtype}: {found.chunks:,} chunks of {found.tokens} tokens are "
        f"ingested in {found.ingestion_s / 60:,.1f} minutes. Load and compute are for one chunk, "
        f"at {found.disk_gbps:g} GB/s.",
        highlight=False,
        markup=False,
    )
