"""The picture of an evaluation: fidelity and retention over the share recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ragkv_bench.quality.summary import Evaluation, SummaryRow
from ragkv_bench.results import COLOURS, MARKERS, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHES = ("-", "--", "-.", ":")
_EXACT_KL = 1e-6


def chart(evaluation: Evaluation) -> Figure:
    """Draw KL (log scale) and retention over the share recomputed, one line a method.

    Methods differ in colour, marker and dashes; bars are 95% bootstrap intervals. Ratio
    ``"auto"`` is a point of its own. What equals full attention (KL under 1e-6) is left
    out: it has no place on a log scale.
    """
    title = f"{evaluation.model_name} on {evaluation.data}, {evaluation.examples} examples"
    figure, (left, right) = panels(title, (9.0, 4.6), columns=2)
    for (method, rows), style in zip(_lines(evaluation), _styles(), strict=False):
        _line(left, rows, "kl", method, style)
        _line(right, rows, "retention", method, style)
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
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False
        )
    return figure


def _lines(evaluation: Evaluation) -> Iterator[tuple[str, list[SummaryRow]]]:
    """Yield every method that is not exact with its rows, by share recomputed."""
    lines: dict[str, list[SummaryRow]] = {}
    for row in evaluation.rows:
        if (row.kl or 0.0) >= _EXACT_KL:
            name = f"{row.method} auto" if row.ratio == "auto" else row.method
            lines.setdefault(name, []).append(row)
    for name, rows in lines.items():
        yield name, sorted(rows, key=lambda row: row.share_recomputed or 0.0)


def _styles() -> Iterator[dict[str, Any]]:
    """Yield endless line styles; colour, marker and dashes run in cycles of other lengths."""
    for colour, marker, dashes in zip(cycle(COLOURS), cycle(MARKERS), cycle(_DASHES), strict=False):
        yield {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 6}


def _line(axes: Axes, rows: list[SummaryRow], name: str, label: str, style: dict[str, Any]) -> None:
    points = [
        (row.share_recomputed, value, *row.ci95.get(name, (value, value)))
        for row in rows
        if (value := getattr(row, name)) is not None and row.share_recomputed is not None
    ]
    if not points:
        return
    x, y, low, high = zip(*points, strict=True)
    below = [max(0.0, value - end) for value, end in zip(y, low, strict=True)]
    above = [max(0.0, end - value) for value, end in zip(y, high, strict=True)]
    _, caps, bars = axes.errorbar(
        x, y, [below, above], label=label, elinewidth=0.8, capsize=2, **style
    )
    for part in (*caps, *bars):
        part.set_alpha(0.5)
