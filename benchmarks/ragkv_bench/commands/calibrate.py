"""``ragkv calibrate``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli import console
from ragkv_bench.commands import options
from ragkv_bench.quality.records import records_path

_VERDICTS = {
    "holds": "keeps the target with 95% confidence.",
    "likely": "is likely to keep the target; the examples do not show it.",
}


def calibrate_command(
    *,
    data: options.Data,
    target: Annotated[
        float, typer.Option(help="Share of full attention's behaviour to keep.")
    ] = 0.95,
    model: options.Model = None,
    method: Annotated[str, typer.Option(help="How tokens to recompute are chosen.")] = "query",
    measure: Annotated[
        str, typer.Option(help="agreement (next tokens) or retention (task score).")
    ] = "agreement",
    ratio: Annotated[
        str, typer.Option(help="Comma-separated candidates, tried from the highest down.")
    ] = "0.7,0.5,0.3,0.2,0.15,0.1,0.05,0",
    limit: options.Limit = None,
    seed: Annotated[int, typer.Option(help="Draws examples and intervals.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the profile here; measurements beside it are kept."),
    ] = None,
    accept_likely: Annotated[
        bool,
        typer.Option("--accept-likely", help="Take a ratio whose mean reaches the target."),
    ] = False,
    auxiliary_model: options.AuxiliaryModel = None,
    device: options.Device = None,
    dtype: options.DType = None,
) -> None:
    """Find the smallest ratio that your examples show to be enough; exit code 2 if none is."""
    options.check_folders(out)

    from ragkv_bench.data.examples import read_data
    from ragkv_bench.quality.calibration import calibrate

    examples = read_data(data).pick(limit, seed)
    with (
        options.engine(model, auxiliary_model, device=device, dtype=dtype) as kv,
        options.interruptible(out),
    ):
        found = calibrate(
            kv,
            examples,
            target=target,
            method=method,
            measure=measure,  # type: ignore[arg-type]  # checked there
            ratios=options.ratios_of(ratio),
            seed=seed,
            records=records_path(out) if out is not None else None,
            show_progress=True,
        )
    console.out.print(found.table())
    chosen = found.chosen(accept_likely=accept_likely)
    console.out.print(f"recompute_ratio={chosen.ratio:g} {_VERDICTS[chosen.verdict]}")
    if out is not None:
        found.save(out, accept_likely=accept_likely)
        console.out.print(f"Profile: {out}", markup=False, highlight=False, soft_wrap=True)
