"""``ragkv calibrate``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ragkv_bench.commands import options
from ragkv_bench.commands.evaluate import ratios_of, read_examples
from ragkv_bench.quality.records import records_path


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
        typer.Option(help="Write the profile here; an interrupted run is resumed."),
    ] = None,
    accept_likely: Annotated[
        bool,
        typer.Option("--accept-likely", help="Take a ratio whose mean reaches the target."),
    ] = False,
    strict: options.Strict = True,
    resume: options.Resume = None,
    auxiliary_model: options.AuxiliaryModel = None,
    device: options.Device = None,
    dtype: options.DType = None,
) -> None:
    """Find the smallest ratio that your examples show to be enough; exit code 2 if none is."""
    options.check_folders(out)

    from ragkv import RagKV, ReuseConfig
    from ragkv_bench.quality.calibration import calibrate

    examples = read_examples(data, strict=strict).pick(limit, seed)
    console = Console()
    with RagKV(
        model,
        store=":memory:",
        reuse=ReuseConfig(auxiliary_model=auxiliary_model, seed=seed),
        device=device,
        dtype=dtype,
    ) as kv:
        try:
            found = calibrate(
                kv,
                examples,
                target=target,
                method=method,
                measure=measure,  # type: ignore[arg-type]  # checked there
                ratios=ratios_of(ratio),
                seed=seed,
                records=records_path(out) if out is not None else None,
                resume=resume,
                strict=strict,
                show_progress=True,
            )
        except KeyboardInterrupt:
            if out is not None:
                console.print("Interrupted. The same command goes on from here.")
            raise typer.Exit(130) from None
    console.print(found.table())
    chosen = found.chosen(accept_likely=accept_likely)
    console.print(f"recompute_ratio={chosen.ratio:g} {_SAID[chosen.verdict]}")
    if out is not None:
        found.save(out, accept_likely=accept_likely)
        console.print(f"Profile: {out}", markup=False, highlight=False, soft_wrap=True)


_SAID = {
    "holds": "keeps the target with 95% confidence.",
    "likely": "is likely to keep the target; the examples do not show it.",
}
