"""Training: AdamW over whole examples, keeping the weights that are best on held-out ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

import torch
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm.auto import tqdm

from ragkv.errors import ConfigError
from ragkv_bench.tune.features import Features, Tail

TOP = 0.2
"""Share of an example's chunk tokens that the Jaccard overlap compares."""
_LEAST = 1e-12
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class TuningFigures:
    """Means over examples: KL(target || scores) in nats, and the overlap of the top fifths."""

    kl: float
    jaccard: float


def divergence(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return KL(target || scores) in nats: the loss (CacheClip, arXiv 2510.10129).

    Both are ``[chunk tokens]`` float32. The scores are raw, as the selection rule compares them;
    the target sums to one.
    """
    logs = scores.clamp_min(_LEAST).log()
    return functional.kl_div(logs - logs.logsumexp(0), target, reduction="sum")


def jaccard(scores: torch.Tensor, target: torch.Tensor, share: float = TOP) -> float:
    """Return the Jaccard overlap of the two top shares (at least one token each)."""
    count = max(1, round(share * len(target)))
    a, b = (set(each.topk(count).indices.tolist()) for each in (scores, target))
    return len(a & b) / len(a | b)


@torch.no_grad()
def measure(tail: Tail, examples: Sequence[Features]) -> TuningFigures:
    """Return the means over some examples."""
    return _mean([(tail.scores(example), example.target) for example in examples])


@torch.no_grad()
def _mean(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> TuningFigures:
    return TuningFigures(
        fmean(float(divergence(scores, target)) for scores, target in pairs),
        fmean(jaccard(scores, target) for scores, target in pairs),
    )


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """How the auxiliary model's last ``layers`` are trained.

    At most ``epochs`` passes, fewer when the KL on the held-out share of the examples has not
    fallen for ``patience`` passes. The learning rate ``lr`` falls to zero along a cosine. ``seed``
    draws the split and the order.
    """

    layers: int = 2
    epochs: int = 6
    lr: float = 3e-4
    holdout: float = 0.2
    patience: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "epochs", "patience"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        if not self.lr > 0:
            raise ConfigError(f"lr must be above 0, not {self.lr!r}")
        if not 0 < self.holdout < 1:
            raise ConfigError(f"holdout must lie between 0 and 1, not {self.holdout!r}")


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass: on the training examples while it ran, on the held-out ones after it."""

    number: int
    training: TuningFigures
    heldout: TuningFigures


def split(examples: Sequence[Item], settings: TuneSettings) -> tuple[list[Item], list[Item]]:
    """Return the training and the held-out examples, drawn with the seed.

    Raises ConfigError: one of the two would be empty.
    """
    held = round(settings.holdout * len(examples))
    if not 0 < held < len(examples):
        raise ConfigError(
            f"holdout {settings.holdout:g} of {len(examples)} examples leaves none to "
            f"{'train on' if held else 'hold out'}: give more examples or another holdout"
        )
    order = list(range(len(examples)))
    random.Random(settings.seed).shuffle(order)  # noqa: S311  seeded, not secret
    return [examples[i] for i in sorted(order[held:])], [examples[i] for i in sorted(order[:held])]


def train(
    tail: Tail,
    training: Sequence[Features],
    heldout: Sequence[Features],
    settings: TuneSettings,
    *,
    show_progress: bool = False,
) -> list[Epoch]:
    """Train in place, one example a step, and keep the weights that are best on held-out ones.

    The first epoch returned, number 0, is before training; its weights are kept if no pass was
    better. Weights are not decayed: they are to stay near those of the language model.
    """
    weights = tail.thaw(training[0])
    optimizer = AdamW(weights.values(), lr=settings.lr, weight_decay=0.0)
    schedule = CosineAnnealingLR(optimizer, settings.epochs * len(training))
    shuffle = random.Random(settings.seed).sample  # noqa: S311  seeded, not secret
    epochs = [Epoch(0, measure(tail, training), measure(tail, heldout))]
    best, kept = epochs[0], _copy(weights)
    bar = tqdm(total=settings.epochs * len(training), desc="train", disable=not show_progress)
    with bar:
        while len(epochs) <= settings.epochs and len(epochs) - best.number <= settings.patience:
            seen = []
            for example in shuffle(training, len(training)):
                scores = tail.scores(example)
                optimizer.zero_grad()
                divergence(scores, example.target).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                seen.append((scores.detach(), example.target))
                bar.update()
            epochs.append(Epoch(len(epochs), _mean(seen), measure(tail, heldout)))
            bar.set_postfix_str(f"held-out KL {epochs[-1].heldout.kl:.3f}")
            if epochs[-1].heldout.kl < best.heldout.kl:
                best, kept = epochs[-1], _copy(weights)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(kept[name])
    return epochs


def _copy(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}
