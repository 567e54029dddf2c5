"""Intervals over examples: bootstrap (Efron 1979, percentile method), and of rates."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Interval = tuple[float, float]
RESAMPLES = 2000


def ratio_of_sums(above: Array, below: Array, axis: int = -1) -> Array:
    """``sum(above) / sum(below)`` over an axis; NaN where ``below`` sums to 0."""
    total = below.sum(axis=axis)
    out: Array = np.full(np.shape(total), np.nan)
    np.divide(above.sum(axis=axis), total, out=out, where=total != 0)
    return out


def wilson(rate: float, count: int) -> Interval:
    """Return the 95% interval of a rate over ``count`` cases (Wilson 1927)."""
    z = 1.959964
    middle, shrink = rate + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return max(0.0, (middle - half) / shrink), min(1.0, (middle + half) / shrink)


def interval(
    statistic: Callable[..., Array], *columns: Array, level: float = 0.95, seed: int = 0
) -> Interval | None:
    """Return the interval with this share of the statistics of resampled examples.

    All columns, ``[examples]`` each, are resampled by the same indices (paired). None where there
    is no example, or no resample has a value.
    """
    count = len(columns[0])
    if count == 0:
        return None
    picks = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
    values = statistic(*(column[picks] for column in columns), axis=-1)
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
