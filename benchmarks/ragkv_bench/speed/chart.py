"""The pictures of a benchmark: speed-up, whole answers, and a server's latencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ragkv_bench.results import COLOURS, MARKERS, legend_below, panels
from ragkv_bench.speed.table import PERCENTS, Found, load_title, setting_name, title_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 0.8
_LOAD = {"ttft": "seconds to the first token", "answer": "seconds to the last token"}


def ttft_chart(found: Found) -> Figure:
    """Draw the speed-up (log scale) over tokens, one line a setting, its bound dashed.

    Bars are the quartiles over rounds. The tier is named where there is more than one.
    """
    figure, (axes,) = panels(title_of(found), (8.0, 5.0))
    from matplotlib.lines import Line2D

    several = len({row["tier"] for row in found["rows"]}) > 1
    lines: dict[str, list[Found]] = {}
    for row in sorted(found["rows"], key=lambda row: row["tokens"]):
        name = setting_name(row) + (f", {row['tier']}" if several else "")
        lines.setdefault(name, []).append(row)
    handles: list[Any] = []
    for (name, rows), style in zip(lines.items(), _styles(), strict=False):
        tokens, speedups = zip(*((row["tokens"], row["speedup"]) for row in rows), strict=True)
        below = [max(0.0, row["speedup"] - row["quartiles"][0]) for row in rows]
        above = [max(0.0, row["quartiles"][1] - row["speedup"]) for row in rows]
        bars = axes.errorbar(tokens, speedups, [below, above], capsize=2, label=name, **style)
        handles.append(bars)
        bounds = [row["full_s"] / row["bound_s"] for row in rows]
        axes.plot(tokens, bounds, color=style["color"], linestyle="--", linewidth=1)
    handles.append(
        Line2D([], [], color="0.3", linestyle="--", linewidth=1, label="arithmetic bound")
    )
    axes.axhline(1.0, color="0.6", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    lengths = sorted({row["tokens"] for row in found["rows"]})
    axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths], minor=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("speed-up of the first token over full prefill")
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def answer_chart(found: Found) -> Figure:
    """Draw seconds to the last token over the answer's length, a panel a prompt length."""
    lengths = sorted({row["tokens"] for row in found["rows"]})
    size = (4.2 * len(lengths) + 1, 4.2)
    figure, all_axes = panels(title_of(found), size, len(lengths))
    for tokens, axes in zip(lengths, all_axes, strict=True):
        lines: dict[str, dict[int, float]] = {}
        for row in (*found["rows"], *found["peers"]):
            if row["tokens"] == tokens:
                name = row["name"] if "name" in row else f"ragkv, {setting_name(row)}"
                lines.setdefault(name, {})[row["answer_tokens"]] = row["total_s"]
                if "full_total_s" in row:
                    full = lines.setdefault("transformers", {})
                    full[row["answer_tokens"]] = row["full_total_s"]
        for (name, points), style in zip(sorted(lines.items()), _styles(), strict=False):
            axes.plot(*zip(*sorted(points.items()), strict=True), label=name, **style)
        axes.set_title(f"prompt of {tokens:,} tokens")
        axes.set_xlabel("answer tokens")
        axes.set_ylim(bottom=0)
    all_axes[0].set_ylabel("seconds to the last token")
    legend_below(figure, all_axes[0])
    return figure


def load_chart(results: Sequence[Found]) -> Figure:
    """Draw p50, p90 and p99 over all requests, a group of bars an engine."""
    figure, all_axes = panels(load_title(results), (3.0 + 2.0 * len(results), 4.2), len(_LOAD))
    width = _WIDTH / len(PERCENTS)
    for (measure, label), axes in zip(_LOAD.items(), all_axes, strict=True):
        for place, (percent, colour) in enumerate(zip(PERCENTS, COLOURS, strict=False)):
            values = [one["rows"][0][f"{measure}_p{percent}_s"] or 0.0 for one in results]
            at = [engine + (place - 1) * width for engine in range(len(results))]
            axes.bar(at, values, width, color=colour, label=f"p{percent}")
        axes.set_xticks(range(len(results)), [one["name"] for one in results])
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    legend_below(figure, all_axes[0])
    return figure


def _styles() -> Iterator[dict[str, Any]]:
    """Yield endless line styles."""
    for colour, marker in zip(cycle(COLOURS), cycle(MARKERS), strict=False):
        yield {"color": colour, "marker": marker}
