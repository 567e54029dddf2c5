"""``ragkv store simulate``: which eviction policy would have served a trace best."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ragkv.cli import options
from ragkv.cli.console import out
from ragkv.errors import ConfigError
from ragkv.measure import results

if TYPE_CHECKING:
    from ragkv.measure.capacity.simulate import Outcome, Request
    from ragkv.store.tiers.costs import CostTable


def simulate_command(
    nbytes: Annotated[int, typer.Option("--bytes", min=1, help="Budget of the tier.")],
    trace: Annotated[
        Path | None, typer.Option(help="JSONL of requests; its form: docs/tiers.md.")
    ] = None,
    zipf: Annotated[
        str | None,
        typer.Option(
            help="Draw a trace in which 3% of the chunks take 60% of the requests: "
            "chunks=10000,requests=20000,seed=0,per_request=4."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policies, with commas.", show_default="all")
    ] = None,
    bytes_per_token: Annotated[
        int, typer.Option(min=1, help="Bytes of a token, see `ragkv plan`.")
    ] = 131_072,
    prefill_tps: Annotated[
        float, typer.Option(min=1e-3, help="Tokens a second that the model computes.")
    ] = 5000.0,
    costs: Annotated[
        Path | None, typer.Option(help="Measured costs instead: what `ragkv plan --json` printed.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Replay a retrieval trace against eviction policies, with and without admission."""
    from ragkv.measure.capacity.simulate import simulate
    from ragkv.store.tiers.policies import make_policy, policy_names

    options.check_folders(json_path)
    names = policy_names() if policy is None else [name.strip() for name in policy.split(",")]
    for name in names:
        make_policy(name)
    table = _costs(costs, prefill_tps)
    requests = _requests(trace, zipf)
    outcomes = {
        name: [
            simulate(
                requests,
                name,
                nbytes,
                bytes_per_token=bytes_per_token,
                costs=table,
                admission=admission,
            )
            for admission in (False, True)
        ]
        for name in names
    }
    out.print(_table(outcomes))
    if json_path is not None:
        shown = {
            "requests": len(requests),
            "bytes": nbytes,
            "bytes_per_token": bytes_per_token,
            "policies": {
                name: {"plain": plain.to_dict(), "admission": admitted.to_dict()}
                for name, (plain, admitted) in outcomes.items()
            },
        }
        results.write(json_path, shown)


def _table(outcomes: dict[str, list[Outcome]]) -> Table:
    table = Table("policy", "hits", "saved s", "saved", "with admission: hits", "saved s", "saved")
    for name, pair in outcomes.items():
        cells = [
            cell
            for one in pair
            for cell in (f"{one.hit_rate:.1%}", f"{one.saved_s:,.0f}", f"{one.saved:.1%}")
        ]
        table.add_row(name, *cells)
    return table


def _requests(trace: Path | None, zipf: str | None) -> list[Request]:
    from ragkv.measure.capacity.simulate import read_trace, zipf_trace

    if (trace is None) == (zipf is None):
        raise ConfigError("give either --trace FILE or --zipf chunks=10000,requests=20000,seed=0")
    if trace is not None:
        return read_trace(trace)
    try:
        pairs = (pair.split("=") for pair in str(zipf).split(",") if pair)
        return zipf_trace(**{name.strip(): int(value) for name, value in pairs})
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--zipf {zipf}: it must be like chunks=10000,requests=20000,seed=0,per_request=4"
        ) from error


def _costs(path: Path | None, prefill_tps: float) -> CostTable:
    from ragkv.store.tiers.costs import CostTable

    if path is None:
        if not math.isfinite(prefill_tps):
            raise ConfigError(f"--prefill-tps must be a number above 0, not {prefill_tps:g}")
        return CostTable.at_rate(prefill_tps)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return CostTable.from_dict(
        found["costs"] if isinstance(found, dict) and "costs" in found else {}
    )
