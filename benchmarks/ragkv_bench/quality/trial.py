"""One ratio of a calibration: what the examples show of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ragkv.errors import ConfigError
from ragkv_bench.quality.intervals import interval, ratio_of_sums
from ragkv_bench.quality.records import EvalRecord
from ragkv_bench.quality.subject import FULL
from ragkv_bench.quality.summary import summarise

Measure = Literal["agreement", "retention"]
Verdict = Literal["holds", "likely", "no"]
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Trial:
    """What the examples show of one ratio.

    Attributes
    ----------
    mean, low
        The measure's mean and its one-sided 95% bound, 1 is full attention.
    examples
        How many the measure could use: for ``retention`` those that full attention answers.
    verdict
        ``holds``: the bound reaches the target, as at every higher ratio that was tried.
        ``likely``: the mean does. ``no``: not even the mean.
    share_recomputed, speedup
        As in :class:`ragkv_bench.quality.summary.SummaryRow`.
    """

    ratio: float
    mean: float
    low: float
    examples: int
    verdict: Verdict
    share_recomputed: float | None
    speedup: float | None


def judge(
    records: Sequence[EvalRecord],
    ratio: float,
    *,
    measure: Measure,
    target: float,
    above: bool = True,
    seed: int = 0,
) -> Trial:
    """Judge one ratio by its records and those of full attention on the same examples.

    Parameters
    ----------
    above
        Whether every higher ratio that was tried holds.

    Raises
    ------
    ConfigError
        Full attention answers no example, and the measure is ``retention``.
    """
    mean, low, examples = bound(records, measure, seed=seed)
    (row,) = (row for row in summarise(records, seed=seed) if row.method != FULL)
    verdict: Verdict = "no"
    if mean >= target:
        verdict = "holds" if low >= target and above else "likely"
    return Trial(ratio, mean, low, examples, verdict, row.share_recomputed, row.speedup)


def bound(
    records: Sequence[EvalRecord], measure: Measure, *, seed: int = 0
) -> tuple[float, float, int]:
    """Return a measure's mean, its bound from below, and the number of examples.

    The bound is the 5% quantile of the bootstrap over examples, each method's beside full
    attention's on the same example. One example that the method fails wholly is added to every
    sample first. Without it examples that all agree would show any target, however few they are;
    with it n of them show about 1 - 3/n (the "rule of three"), and the bound errs in less than 5%
    of data sets for skewed losses too.
    """
    full = {record.id: record.score for record in records if record.method == FULL}
    own = [record for record in records if record.method != FULL]
    if measure == "agreement":
        kept, of = np.array([record.agreement for record in own]), np.ones(len(own))
    else:
        own = [record for record in own if full[record.id] > 0]
        kept = np.array([record.score for record in own])
        of = np.array([full[record.id] for record in own])
    if not own:
        raise ConfigError(
            "full attention answers none of the examples, so there is no score to keep:"
            " calibrate with measure 'agreement'"
        )
    failed = np.append(kept, 0.0), np.append(of, of.mean())
    ends = interval(ratio_of_sums, *failed, level=2 * _CONFIDENCE - 1, seed=seed)
    return float(ratio_of_sums(kept, of)), ends[0] if ends is not None else 0.0, len(own)
