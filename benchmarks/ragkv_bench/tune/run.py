"""From examples and two models to a tuned auxiliary model and what the tuning did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table
from tqdm.auto import tqdm

from ragkv.model.loaded import LoadedModel, require_reusable
from ragkv_bench import results
from ragkv_bench.data.examples import DataSet
from ragkv_bench.tune.features import Tail
from ragkv_bench.tune.target import Target, look, read_question
from ragkv_bench.tune.train import TOP, Epoch, TuneSettings, split, train


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a tuning did; ``best_epoch`` has the weights that were kept, 0 those before training."""

    primary: str
    auxiliary: str
    data: str
    settings: TuneSettings
    trained_on: int
    held_out: int
    epochs: tuple[Epoch, ...]
    best_epoch: int

    def save(self, path: str | Path) -> None:
        """Write everything as JSON."""
        results.write(path, asdict(self))

    def table(self) -> Table:
        """Return a rich table: one row a pass, the first before training."""
        caption = (
            f"{self.trained_on} examples trained on, {self.held_out} held out. KL: of the auxiliary"
            " model's scores from the primary model's attention, in nats. overlap: Jaccard of the"
            f" top {TOP:.0%} of the chunk tokens. Kept: pass {self.best_epoch}, with the least"
            " held-out KL."
        )
        columns = {
            "pass": lambda row: str(row.number),
            "KL trained on": lambda row: f"{row.training.kl:.3f}",
            "overlap": lambda row: f"{row.training.jaccard:.1%}",
            "KL held out": lambda row: f"{row.heldout.kl:.3f}",
            "overlap held out": lambda row: f"{row.heldout.jaccard:.1%}",
        }
        title = f"{self.auxiliary} for {self.primary} on {self.data}"
        return results.table(title, caption, self.epochs, columns, words=0)


def targets_of(data: DataSet, primary: LoadedModel, *, show_progress: bool = False) -> list[Target]:
    """Return what the primary model's query attends to in every example.

    All prompts are read before the model runs: a bad one is named at once.

    Raises ConfigError: an example has no chunk that can be reused; PromptTooLongError: a prompt has
    more tokens than the primary model has positions.
    """
    reusable = require_reusable(primary)
    questions = [read_question(example, primary) for example in data.examples]
    return [
        look(question, reusable)
        for question in tqdm(questions, desc="targets", disable=not show_progress)
    ]


def tune(
    targets: Sequence[Target],
    auxiliary: LoadedModel,
    settings: TuneSettings,
    *,
    primary: str,
    data: str,
    show_progress: bool = False,
) -> Tuning:
    """Train the auxiliary model, in place, towards the targets; ``primary``, ``data`` are names.

    Raises ConfigError: there are too few examples to split, or the model has too few layers.
    """
    divided = split(targets, settings)
    tail = Tail(require_reusable(auxiliary), settings.layers)
    training, heldout = (
        [tail.features(target) for target in tqdm(part, desc=name, disable=not show_progress)]
        for part, name in zip(divided, ("features", "held-out features"), strict=True)
    )
    epochs = train(tail, training, heldout, settings, show_progress=show_progress)
    best = min(epochs, key=lambda epoch: epoch.heldout.kl)
    counts = len(training), len(heldout)
    names = primary, auxiliary.name, data
    return Tuning(*names, settings, *counts, tuple(epochs), best.number)
