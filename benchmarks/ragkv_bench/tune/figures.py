"""How near the auxiliary model's scores are to the target: KL and Jaccard overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch.nn import functional

from ragkv_bench.tune.features import Features, Tail

TOP = 0.2
"""Share of an example's chunk tokens that the Jaccard overlap compares."""
_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class TuningFigures:
    """Means over examples.

    Attributes
    ----------
    kl
        KL(target || scores) in nats; both are normalised over an example's chunk tokens.
    jaccard
        Tokens that are in both top fifths, over those that are in either.
    """

    kl: float
    jaccard: float


def divergence(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return KL(target || scores) in nats: the loss (CacheClip, arXiv 2510.10129).

    Parameters
    ----------
    scores
        ``[chunk tokens]`` float32, not normalised: chunks are compared by their raw
        scores, as the selection rule compares them.
    target
        ``[chunk tokens]`` float32, sums to one.
    """
    logs = scores.clamp_min(_LEAST).log()
    return functional.kl_div(logs - logs.logsumexp(0), target, reduction="sum")


def jaccard(scores: torch.Tensor, target: torch.Tensor, share: float = TOP) -> float:
    """Return the Jaccard overlap of the two top shares (at least one token each)."""
    count = max(1, round(share * len(target)))
    a, b = (set(each.topk(count).indices.tolist()) for each in (scores, target))
    return len(a & b) / len(a | b)


@torch.no_grad()
def figures(scores: torch.Tensor, target: torch.Tensor) -> TuningFigures:
    """Return one example's figures."""
    return TuningFigures(float(divergence(scores, target)), jaccard(scores, target))


@torch.no_grad()
def measure(tail: Tail, examples: Sequence[Features]) -> TuningFigures:
    """Return the means over some examples."""
    return mean([figures(tail.scores(example), example.target) for example in examples])


def mean(rows: Sequence[TuningFigures]) -> TuningFigures:
    """Return the mean of each figure."""
    return TuningFigures(fmean(row.kl for row in rows), fmean(row.jaccard for row in rows))
