"""``python -m soak``: a server under load, harm and a restart; say what was found."""

import asyncio
import signal
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from soak.run import Soak, SoakPlan, soak

err = Console(stderr=True)
out = Console()


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 10.0,
    clients: Annotated[int, typer.Option(min=1, help="At once.")] = 16,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub name.", show_default="the embedded SmolLM2-135M"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 compares quantised models' answers most strictly.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="A server with the keys of soak/asking.py, instead of starting one; it is not "
            "restarted, and its memory is not looked at."
        ),
    ] = None,
    disk_mb: Annotated[int, typer.Option(help="The store's room.")] = 256,
    seed: Annotated[int, typer.Option(help="Draws other questions and deeds.")] = 0,
) -> None:
    """Soak a server; exit code 1 on a wrong answer, an error out of form, or a leak."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server ends, too
    plan = SoakPlan(seconds=60 * minutes, clients=clients, seed=seed, disk_bytes=disk_mb << 20)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        done = asyncio.run(
            soak(plan, Path(folder), url=url, model=model, dtype=dtype, say=err.print)
        )
    _show(done)
    raise typer.Exit(bool(done.findings.violations))


def _show(done: Soak) -> None:
    found = done.findings
    for name, counts in (("Counted", found.counts), ("Statuses", found.statuses)):
        line = ", ".join(f"{what}: {count}" for what, count in sorted(counts.items()))
        out.print(f"{name}: {line}.", markup=False, highlight=False)
    growth = done.growth()
    if growth is not None:
        out.print(
            f"Memory: at most {max(done.rss) / 1e6:.0f} MB after the restart, {growth:+.1%} from "
            "the middle third to the last.",
            highlight=False,
        )
    out.print(f"Violations: {len(found.violations)}.", highlight=False)
    for line in dict.fromkeys(found.violations):
        out.print(f"- {line}", markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
