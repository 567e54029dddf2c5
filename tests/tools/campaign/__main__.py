"""``python -m campaign``: run the faults, then the threads and processes; say what was found."""

import json
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from campaign.case import Outcome
from campaign.run import run_campaign
from campaign.stress import PROCESSES, THREADS, Stress, run_stress

err = Console(stderr=True)
out = Console(width=max(Console().width, 130))  # the table's


def main(
    runs: Annotated[int, typer.Option(min=0, help="Faults in all.")] = 220,
    seconds: Annotated[
        float, typer.Option(min=0, help="How long threads and processes work on one store.")
    ] = 60,
    seed: Annotated[int, typer.Option(help="Draws other moments, bytes and prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Do harm to stores; exit code 1 on any wrong answer or loss."""
    logging.disable(logging.WARNING)  # every miss has one, and there will be many
    done = 0

    def on_run(name: str, outcome: Outcome) -> None:
        nonlocal done
        done += 1
        harm = outcome.wrong + outcome.lost
        err.print(f"{done}/{runs} {name}{': ' + '; '.join(harm) if harm else ''}", markup=False)

    faults = run_campaign(runs, seed, on_run)
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        stress = run_stress(seconds, Path(folder), seed) if seconds else Stress()
    if as_json:
        found = {name: asdict(outcome) for name, outcome in faults.items()}
        out.print_json(json.dumps({"seed": seed, "faults": found, "stress": vars(stress)}))
    else:
        _show(faults, stress)
    harm = [*stress.wrong, *(line for o in faults.values() for line in o.wrong + o.lost)]
    raise typer.Exit(bool(harm))


def _show(faults: dict[str, Outcome], stress: Stress) -> None:
    counted = ("runs", "struck", "answers", "refused", "damaged", "healed")
    table = Table("fault", *counted, "wrong", "lost", "misses")
    for name, o in faults.items():
        counts = [getattr(o, column) for column in counted]
        misses = ", ".join(f"{count} {reason}" for reason, count in sorted(o.misses.items()))
        table.add_row(name, *map(str, [*counts, len(o.wrong), len(o.lost)]), misses)
    out.print(table)
    for name, o in faults.items():
        for line in o.wrong + o.lost:
            out.print(f"{name}: {line}", markup=False)
    if stress.seconds:
        done = ", ".join(f"{count} {what}" for what, count in sorted(stress.counts.items()))
        total = sum(stress.counts.values()) / stress.seconds
        out.print(
            f"{PROCESSES} processes of {THREADS} threads, {stress.seconds:.0f} s: {done}; "
            f"{total:.0f} a second. Most bytes: {dict(stress.most_bytes)}. "
            f"Wrong: {len(stress.wrong)}.",
            highlight=False,
        )
        for line in stress.wrong:
            out.print(line, markup=False)


if __name__ == "__main__":
    typer.run(main)
