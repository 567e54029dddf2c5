"""From single measurements to one row a method and ratio, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from ragkv_bench import results
from ragkv_bench.quality.intervals import Array, Interval, interval, ratio_of_sums
from ragkv_bench.quality.records import EvalRecord, Ratio, ratio_name

_CAPTION = (
    "share: of the cached tokens, recomputed. KL, agree: to full attention's next-token"
    " distributions. kept: of full attention's score, where it scores. TTFT in seconds."
    " Grey: 95% intervals."
)


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One method at one ratio, over all examples.

    Attributes
    ----------
    score
        Mean task score.
    retention
        The score as a share of full attention's, over the examples that it answers (score
        above 0).
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

    def to_dict(self) -> results.Found:
        """Return plain JSON-ready types."""
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        results.write(path, self.to_dict())


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


def table(evaluation: Evaluation) -> Table:
    """Return a rich table: one row a method and ratio, intervals below the figures."""

    def name(row: SummaryRow) -> str:
        """Return the method's name, and its ratio unless the method has just one."""
        ratios = {other.ratio for other in evaluation.rows if other.method == row.method}
        alone = ratios in ({0.0}, {1.0})
        return escape(row.method if alone else f"{row.method} {ratio_name(row.ratio)}")

    columns = {
        "method": name,
        "share": _cell("share_recomputed", ".0%"),
        "KL": _cell("kl", ".3f", ".3f"),
        "agree": _cell("agreement", ".0%"),
        "score": _cell("score", ".3f", ".2f"),
        "kept": _cell("retention", ".0%", ".0%"),
        "TTFT": _cell("ttft_s", ".2f"),
        "speed-up": _cell("speedup", ".1f", ".1f", unit="x"),
    }
    model = results.short_name(evaluation.model)
    title = f"{model} on {evaluation.data}, {evaluation.examples} examples"
    return results.table(title, _CAPTION, evaluation.rows, columns)


def _cell(field: str, form: str, of_ends: str = "", unit: str = "") -> Callable[[SummaryRow], str]:
    def shown(row: SummaryRow) -> str:
        value: float | None = getattr(row, field)
        ends, text = row.ci95.get(field), results.cell(value, form, unit)
        if of_ends and ends is not None and ends[0] < ends[1]:
            text += f"\n{results.grey(ends, of_ends)}"
        return text

    return shown
