"""From single measurements to one row a method and ratio, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ragkv_bench.quality.intervals import Array, interval, ratio_of_sums
from ragkv_bench.quality.records import EvalRecord, Ratio
from ragkv_bench.results import reading, write

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One method at one ratio, over all examples.

    Attributes
    ----------
    score, score_answerable
        Mean task score, over all examples and over those that full attention answers
        (score above 0).
    retention
        ``score_answerable`` as a share of full attention's.
    kl, agreement, share_recomputed
        Means over examples.
    ttft_s, speedup
        Medians over examples; the speed-up is each example's full TTFT over its own.
    ci95
        95% bootstrap interval by field name. A figure that no example supports is None
        and has no interval.
    """

    method: str
    ratio: Ratio
    score: float | None
    score_answerable: float | None
    retention: float | None
    kl: float | None
    agreement: float | None
    share_recomputed: float | None
    ttft_s: float | None
    speedup: float | None
    ci95: dict[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome of a run: what ``ragkv eval --json`` writes."""

    model: str
    data: str
    examples: int
    rows: tuple[SummaryRow, ...]

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """Read what :meth:`save` wrote.

        Raises
        ------
        ConfigError
            The file cannot be read or is another command's.
        """
        with reading(path, "{path} is not by `ragkv eval`: {error!r}") as saved:
            for row in saved["rows"]:
                row["ci95"] = {name: (low, high) for name, (low, high) in row["ci95"].items()}
            rows = tuple(SummaryRow(**row) for row in saved["rows"])
            return cls(saved["model"], saved["data"], saved["examples"], rows)


def summarise(records: Sequence[EvalRecord], *, seed: int = 0) -> tuple[SummaryRow, ...]:
    """Return one row for every method and ratio, in order of appearance.

    Every example's records must include method ``full``; ``seed`` is the bootstrap's.
    """
    full = {record.id: record.score for record in records if record.method == "full"}
    groups: dict[tuple[str, Ratio], list[EvalRecord]] = {}
    for record in records:
        groups.setdefault((record.method, record.ratio), []).append(record)
    return tuple(
        _row(method, ratio, group, np.array([full[record.id] for record in group]), seed)
        for (method, ratio), group in groups.items()
    )


def _row(method: str, ratio: Ratio, group: list[EvalRecord], full: Array, seed: int) -> SummaryRow:
    def column(name: str) -> Array:
        return np.array([getattr(record, name) for record in group], dtype=np.float64)

    score, answerable = column("score"), (full > 0).astype(np.float64)
    statistics: dict[str, tuple[Any, ...]] = {
        "score": (np.mean, score),
        "score_answerable": (ratio_of_sums, score * answerable, answerable),
        "retention": (ratio_of_sums, score * answerable, full * answerable),
        "kl": (np.mean, column("kl")),
        "agreement": (np.mean, column("agreement")),
        "share_recomputed": (np.mean, column("share_recomputed")),
        "ttft_s": (np.median, column("ttft_s")),
        "speedup": (np.median, column("ttft_full_s") / column("ttft_s")),
    }
    values: dict[str, float | None] = {}
    ci95: dict[str, Interval] = {}
    for name, (statistic, *columns) in statistics.items():
        value = float(statistic(*columns))
        values[name] = None if math.isnan(value) else value
        ends = interval(statistic, *columns, seed=seed)
        if ends is not None and not math.isnan(value):
            ci95[name] = ends
    return SummaryRow(method=method, ratio=ratio, ci95=ci95, **values)
