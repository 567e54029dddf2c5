"""Bootstrap intervals over examples (Efron 1979, percentile method)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_BLOCK_CELLS = 1 << 22


def mean(values: Array) -> Array:
    """Mean over the last axis."""
    return np.asarray(values.mean(axis=-1), dtype=np.float64)


def median(values: Array) -> Array:
    """Median over the last axis."""
    return np.asarray(np.median(values, axis=-1), dtype=np.float64)


def ratio_of_sums(above: Array, below: Array) -> Array:
    """``sum(above) / sum(below)`` over the last axis; NaN where ``below`` sums to 0."""
    total = below.sum(axis=-1)
    out: Array = np.full(np.shape(total), np.nan)
    np.divide(above.sum(axis=-1), total, out=out, where=total != 0)
    return out


def interval(
    statistic: Callable[..., Array],
    *columns: Array,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Return the percentile interval of a statistic under resampling of examples.

    Parameters
    ----------
    statistic
        Maps arrays ``[..., examples]`` to ``[...]``, one array for each column.
    columns
        ``[examples]`` each; all are resampled by the same indices (paired).
    level
        Share of the resampled statistics between the two ends.

    Returns
    -------
    The two ends, or None where there is no example or no resample has a value.
    """
    count = len(columns[0]) if columns else 0
    if count == 0:
        return None
    random = np.random.default_rng(seed)
    rows = max(1, _BLOCK_CELLS // count)
    parts: list[Array] = []
    for start in range(0, resamples, rows):
        picks = random.integers(0, count, size=(min(rows, resamples - start), count))
        parts.append(statistic(*(column[picks] for column in columns)))
    values = np.concatenate(parts)
    values = values[~np.isnan(values)]
    if len(values) == 0:
        return None
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
