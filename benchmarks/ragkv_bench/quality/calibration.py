"""The smallest ``recompute_ratio`` that the user's own examples show to be enough."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from rich.table import Table

from ragkv.config import PROFILE_FORMAT, ReuseConfig
from ragkv.errors import ConfigError
from ragkv.select import Method, get_method
from ragkv_bench import results
from ragkv_bench.data.examples import DataSet
from ragkv_bench.quality.intervals import interval, ratio_of_sums
from ragkv_bench.quality.records import EvalRecord, Ratio, RecordFile
from ragkv_bench.quality.run import check_chunks, measurements
from ragkv_bench.quality.subject import FULL
from ragkv_bench.quality.summary import summarise

if TYPE_CHECKING:
    from ragkv import RagKV

RATIOS = (0.7, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)
"""What is tried, in this order. Ratio 1 is exact by construction."""

Measure = Literal["agreement", "retention"]
Verdict = Literal["holds", "likely", "no"]
_CONFIDENCE = 0.95
_COLOURS = {"holds": "green", "likely": "yellow", "no": "red"}
_CAPTION = "at least: the mean's one-sided 95% bound. share: of the cached tokens, recomputed."


class NotShownError(ConfigError):
    """The examples do not show that a ratio below 1 keeps the target."""


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


@dataclass(frozen=True, slots=True)
class Calibration:
    """What :func:`calibrate` found; ``trials`` from the highest ratio down.

    ``reuse`` holds the settings that were measured; its ratio is not the chosen one.
    """

    model: str
    fingerprint: str
    reuse: ReuseConfig
    measure: Measure
    target: float
    data: str
    trials: tuple[Trial, ...]

    def chosen(self, *, accept_likely: bool = False) -> Trial:
        """Return the trial of the smallest ratio that holds, or is likely to.

        Raises NotShownError: there is none; the message says how near the data comes.
        """
        accepted = ("holds", "likely") if accept_likely else ("holds",)
        found = [trial for trial in self.trials if trial.verdict in accepted]
        if found:
            return found[-1]
        first = self.trials[0]
        mend = "Lower the target, or try another method."
        if first.verdict != "no":
            mend = "Give more examples; accept_likely (--accept-likely) takes the mean's word."
        raise NotShownError(
            f"no ratio below 1 is shown to keep {self.measure} at {self.target:.1%}: at "
            f"{first.ratio:g} it is {first.mean:.1%} over {first.examples} examples, and at least "
            f"{first.low:.1%} with 95% confidence. {mend}"
        )

    def save(self, path: str | Path, *, accept_likely: bool = False) -> None:
        """Write the profile that :meth:`ragkv.ReuseConfig.from_profile` reads.

        Raises NotShownError: as :meth:`chosen`; nothing is written; ConfigError: the file cannot be
        written, or the method has no name to be found by.
        """
        trial = self.chosen(accept_likely=accept_likely)
        if not isinstance(self.reuse.method, str):
            raise ConfigError(
                "a profile only names its method, and this one was made of pieces: define it in "
                "ragkv/select/rules"
            )
        profile = {
            "format": PROFILE_FORMAT,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "method": self.reuse.method,
            "recompute_ratio": trial.ratio,
            "auxiliary_model": self.reuse.auxiliary_model,
            "measure": self.measure,
            "target": self.target,
            "verdict": trial.verdict,
            "shown": [trial.low, trial.mean],
            "examples": trial.examples,
            "data": self.data,
            "ragkv": importlib.metadata.version("ragkv"),
            "date": datetime.now(UTC).date().isoformat(),
        }
        results.write(path, profile)

    def table(self) -> Table:
        """Return a rich table: one row a ratio."""
        title = (
            f"{self.model} on {self.data}, {self.trials[0].examples} examples\n"
            f"{get_method(self.reuse.method).name} to keep {self.measure} at {self.target:.1%}"
        )
        columns = {
            "ratio": lambda trial: f"{trial.ratio:g}",
            "mean": lambda trial: f"{trial.mean:.1%}",
            "at least": lambda trial: f"{trial.low:.1%}",
            "verdict": lambda trial: f"[{_COLOURS[trial.verdict]}]{trial.verdict}[/]",
            "share": lambda trial: results.cell(trial.share_recomputed, ".0%"),
            "speed-up": lambda trial: results.cell(trial.speedup, ".1f", "x"),
        }
        return results.table(title, _CAPTION, self.trials, columns, words=0)


def calibrate(
    kv: RagKV,
    data: DataSet,
    *,
    target: float = 0.95,
    method: str | Method = "query",
    measure: Measure = "agreement",
    ratios: Sequence[Ratio] = RATIOS,
    seed: int = 0,
    records: str | Path | None = None,
    show_progress: bool = False,
) -> Calibration:
    """Find the smallest ratio that keeps a share of full attention's behaviour.

    Ratios are tried from the highest down, until the mean misses the target. A ratio
    holds if its own bound and that of every higher one reach the target. This is a test
    in fixed sequence (Maurer, Hothorn and Lehmacher, 1995): to promise too low a ratio,
    the first ratio that in truth misses the target must pass, and that has a chance of
    5%. Going on with more examples *because* a ratio was only likely is another look,
    which the 5% do not cover.

    Parameters
    ----------
    target
        Share to keep, between 0 and 1, as the mean over examples.
    measure
        ``agreement``: share of the first 16 tokens of full attention's answer at which
        the method's most likely token is full attention's. It is the default: every
        example counts, whether full attention answers it rightly or not, and its spread
        is small. ``retention``: of full attention's task score, over what it answers.
    ratios
        Candidates; the highest is tried first.
    seed, records
        As in :func:`ragkv_bench.quality.run.evaluate`.

    Raises ConfigError: the target, measure or a ratio cannot be used, the method chooses no tokens,
    the model is served in full, no chunk is long enough to be reused, or no example could be
    measured.
    """
    fingerprint = kv.info.fingerprint
    if fingerprint is None:
        raise ConfigError(f"there is nothing to calibrate: {kv.info.unsupported}")
    if not 0 < target < 1:
        raise ConfigError(f"target must lie between 0 and 1, not {target!r}: only ratio 1 keeps 1")
    if measure not in get_args(Measure):
        raise ConfigError(f"measure must be {' or '.join(get_args(Measure))}, not {measure!r}")
    if get_method(method).score is None:
        raise ConfigError(
            f"method {get_method(method).name} chooses no tokens: it has no ratio to calibrate"
        )
    reuse = kv.reuse.override(method=method, calibrated_for=None)
    order = _order(ratios, reuse)
    check_chunks(data)
    file = RecordFile(records)
    trials: list[Trial] = []
    for ratio in order:
        settings = [(FULL, 1.0), (method, ratio)]
        done = measurements(kv, data, settings, file, show_progress=show_progress)
        above = all(trial.verdict == "holds" for trial in trials)
        trial = judge(done, ratio, measure=measure, target=target, above=above, seed=seed)
        trials.append(trial)
        if trial.verdict == "no":
            break
    return Calibration(kv.info.name, fingerprint, reuse, measure, target, data.name, tuple(trials))


def _order(ratios: Sequence[Ratio], reuse: ReuseConfig) -> list[float]:
    """Return the ratios below 1, the highest first."""
    order: set[float] = set()
    for ratio in ratios:
        if ratio == "auto":
            raise ConfigError("'auto' chooses for each request: name ratios to calibrate")
        reuse.override(recompute_ratio=ratio)
        if ratio < 1:
            order.add(float(ratio))
    if not order:
        raise ConfigError("name at least one ratio below 1 to try: ratio 1 is exact")
    return sorted(order, reverse=True)


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

    ``above`` is whether every higher ratio that was tried holds. Raises ConfigError where full
    attention answers no example, and the measure is ``retention``.
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
