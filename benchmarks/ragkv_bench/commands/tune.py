"""``ragkv tune-auxiliary``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli import console
from ragkv.config import MEMORY
from ragkv.errors import ConfigError
from ragkv_bench.commands import options


def tune_command(
    *,
    data: options.Data,
    primary: Annotated[str, typer.Option(help="Hub name or folder of the model that answers.")],
    out: Annotated[Path, typer.Option(help="New folder for the tuned auxiliary model.")],
    auxiliary: Annotated[
        str | None, typer.Option(help="Model to tune; default: the embedded model.")
    ] = None,
    limit: options.Limit = None,
    skip: Annotated[
        int,
        typer.Option(
            min=0, help="Leave out the examples that `ragkv eval --limit` of this measures."
        ),
    ] = 0,
    holdout: Annotated[float, typer.Option(help="Share of them that is not trained on.")] = 0.2,
    epochs: Annotated[int, typer.Option(help="Most passes over the training examples.")] = 6,
    layers: Annotated[int, typer.Option(help="Last layers that are trained.")] = 2,
    lr: Annotated[float, typer.Option(help="Learning rate at the start.")] = 3e-4,
    seed: Annotated[int, typer.Option(help="Draws examples and the split.")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here, pass by pass.")
    ] = None,
    device: options.Device = None,
) -> None:
    """Train the auxiliary model to look where the primary model's query looks."""
    from ragkv import RagKV
    from ragkv.model.load import load_model
    from ragkv_bench.data.examples import read_data
    from ragkv_bench.tune.run import targets_of, tune
    from ragkv_bench.tune.train import TuneSettings, split

    settings = TuneSettings(layers=layers, epochs=epochs, lr=lr, holdout=holdout, seed=seed)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: give --out a new or empty folder")
    options.check_folders(None if out.is_dir() else out, json_path)
    examples = read_data(data).pick(limit, seed, skip=skip)
    split(examples.examples, settings)
    with RagKV(primary, store=MEMORY, device=device) as kv:
        targets = targets_of(examples, kv.loaded, show_progress=True)
    del kv  # its model makes room for the training
    model = load_model(auxiliary, None, device=device, dtype="float32")
    tuning = tune(targets, model, settings, primary=primary, data=examples.name, show_progress=True)
    model.model.save_pretrained(out)
    model.tokenizer.save_pretrained(out)
    if json_path is not None:
        tuning.save(json_path)
    console.out.print(tuning.table())
    if tuning.best_epoch == 0:
        text = "Training did not improve held-out examples: the folder has the old weights."
        console.out.print(text, style="yellow")
    console.out.print(f"Saved: {out}", markup=False, highlight=False, soft_wrap=True)
