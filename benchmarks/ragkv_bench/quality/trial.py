"""One ratio of a calibration, measured and judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ragkv_bench.quality.kept_bound import Measure, bound
from ragkv_bench.quality.records import EvalRecord
from ragkv_bench.quality.subject import FULL
from ragkv_bench.quality.summary import summarise

Verdict = Literal["holds", "likely", "no"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What the examples show of one ratio.

    Attributes
    ----------
    mean, low
        The measure's mean and its one-sided 95% bound, 1 is full attention.
    examples
        How many the measure could use.
    verdict
        ``holds``: the bound reaches the target, as at every higher ratio that was tried.
        ``likely``: the mean does. ``no``: not even the mean.
    more
        About how many more examples would show a likely ratio to hold; None where the
        mean only just reaches the target, or where a higher ratio is in the way.
    share_recomputed, speedup
        As in :class:`ragkv_bench.quality.summary.SummaryRow`.
    """

    ratio: float
    mean: float
    low: float
    examples: int
    verdict: Verdict
    more: int | None
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
    """Judge one ratio by its records and those of full attention.

    Parameters
    ----------
    above
        Whether every higher ratio that was tried holds.
    """
    found = bound(records, measure, seed=seed)
    (row,) = (row for row in summarise(records, seed=seed) if row.method != FULL)
    verdict: Verdict = "no"
    more = None
    if found.mean >= target:
        reached = found.low >= target
        verdict = "holds" if reached and above else "likely"
        more = None if reached else found.more(target)
    return Trial(
        ratio=ratio,
        mean=found.mean,
        low=found.low,
        examples=found.examples,
        verdict=verdict,
        more=more,
        share_recomputed=row.share_recomputed,
        speedup=row.speedup,
    )
