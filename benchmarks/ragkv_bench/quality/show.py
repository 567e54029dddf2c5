"""An evaluation for people: its table, and the picture of quality over the share recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from ragkv_bench import results
from ragkv_bench.quality.records import ratio_name
from ragkv_bench.quality.summary import Evaluation, SummaryRow
from ragkv_bench.results import legend_below, line_style, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EXACT_KL = 1e-6
_CAPTION = (
    "share: of the cached tokens, recomputed. KL, agree: to full attention's next-token"
    " distributions. kept: of full attention's score, where it scores. TTFT in seconds."
    " Grey: 95% intervals."
)


def table(evaluation: Evaluation) -> Table:
    """Return a rich table: one row a method and ratio, intervals below the figures."""

    def name(row: SummaryRow) -> str:
        """Return the method's name, and its ratio unless the method has just one."""
        ratios = {other.ratio for other in evaluation.rows if other.method == row.method}
        alone = ratios in ({0.0}, {1.0})
        return escape(row.method if alone else f"{row.method} {ratio_name(row.ratio)}")

    columns = {
        "method": name,
        "share": _cell("share_recomputed", "{:.0%}"),
        "KL": _cell("kl", "{:.3f}", "{:.3f}"),
        "agree": _cell("agreement", "{:.0%}"),
        "score": _cell("score", "{:.3f}", "{:.2f}"),
        "kept": _cell("retention", "{:.0%}", "{:.0%}"),
        "TTFT": _cell("ttft_s", "{:.2f}"),
        "speed-up": _cell("speedup", "{:.1f}x", "{:.1f}"),
    }
    return results.table(_title(evaluation), _CAPTION, evaluation.rows, columns)


def _cell(field: str, form: str, interval: str = "") -> Callable[[SummaryRow], str]:
    def shown(row: SummaryRow) -> str:
        value: float | None = getattr(row, field)
        if value is None:
            return "-"
        low, high = row.ci95.get(field, (value, value))
        if not interval or low == high:
            return form.format(value)
        ends = f"{interval.format(low)}-{interval.format(high)}"
        return f"{form.format(value)}\n[bright_black]{ends.replace('%', '')}[/]"

    return shown


def _title(evaluation: Evaluation) -> str:
    model = results.short_name(evaluation.model)
    return f"{model} on {evaluation.data}, {evaluation.examples} examples"


def chart(evaluation: Evaluation) -> Figure:
    """Draw KL (log scale) and retention over the share recomputed, one line a method.

    Bars are 95% bootstrap intervals. Ratio ``"auto"`` is a point of its own. What equals full
    attention (KL under 1e-6) is left out: it has no place on a log scale.
    """
    figure, (left, right) = panels(_title(evaluation), (9.0, 4.6), columns=2)
    lines: dict[str, list[SummaryRow]] = {}
    for row in evaluation.rows:
        if (row.kl or 0.0) >= _EXACT_KL:
            name = f"{row.method} auto" if row.ratio == "auto" else row.method
            lines.setdefault(name, []).append(row)
    for number, (name, rows) in enumerate(lines.items()):
        rows.sort(key=lambda row: row.share_recomputed or 0.0)
        for axes, field in ((left, "kl"), (right, "retention")):
            _line(axes, rows, field, label=name, **line_style(number))
    left.set_yscale("log")
    left.set_ylabel("KL to full attention (nats, lower is better)")
    right.axhline(1.0, color="0.6", linewidth=1, zorder=0)
    right.set_ylabel("score kept, of what full attention answers")
    right.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    for axes in (left, right):
        if not axes.containers:
            axes.text(0.5, 0.5, "no figures", transform=axes.transAxes, ha="center", color="0.5")
        axes.set_xlabel("share of cached tokens recomputed")
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    legend_below(figure, left)
    return figure


def _line(axes: Axes, rows: list[SummaryRow], field: str, **style: Any) -> None:
    points = [
        (row.share_recomputed, value, *row.ci95.get(field, (value, value)))
        for row in rows
        if (value := getattr(row, field)) is not None and row.share_recomputed is not None
    ]
    if not points:
        return
    x, y, low, high = zip(*points, strict=True)
    below = [max(0.0, value - end) for value, end in zip(y, low, strict=True)]
    above = [max(0.0, end - value) for value, end in zip(y, high, strict=True)]
    _, caps, bars = axes.errorbar(x, y, [below, above], elinewidth=0.8, capsize=2, **style)
    for part in (*caps, *bars):
        part.set_alpha(0.5)
