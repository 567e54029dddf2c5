"""The picture of a benchmark: speed-up over prompt length, against the arithmetic bound."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

from ragkv_bench.results import COLOURS, MARKERS, panels
from ragkv_bench.speed.result import AnswerBenchmark, Benchmark, BenchRow, setting_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def chart(benchmark: Benchmark) -> Figure:
    """Draw the speed-up (log scale) over tokens, one line a setting, its bound dashed.

    Bars are the quartiles over rounds.
    """
    title = f"{benchmark.model_name} on {benchmark.device}"
    figure, (axes,) = panels(title, (8.0, 5.0))
    from matplotlib.lines import Line2D

    handles = []
    styles = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
    for (name, rows), (colour, marker) in zip(_lines(benchmark).items(), styles, strict=False):
        tokens = [row.tokens for row in rows]
        speedups = [row.speedup for row in rows]
        below = [max(0.0, row.speedup - row.quartiles[0]) for row in rows]
        above = [max(0.0, row.quartiles[1] - row.speedup) for row in rows]
        drawn = axes.errorbar(
            tokens, speedups, [below, above], color=colour, marker=marker, capsize=2, label=name
        )
        bounds = [row.full_s / row.bound_s for row in rows]
        axes.plot(tokens, bounds, color=colour, linestyle="--", linewidth=1)
        handles.append(drawn)
    axes.axhline(1.0, color="0.6", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    lengths = sorted({row.tokens for row in benchmark.rows})
    axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths], minor=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("speed-up of the first token over full prefill")
    bound = Line2D([], [], color="0.3", linestyle="--", linewidth=1, label="arithmetic bound")
    figure.legend(handles=[*handles, bound], loc="outside lower center", ncols=3, frameon=False)
    return figure


def answer_chart(benchmark: AnswerBenchmark) -> Figure:
    """Draw seconds to the last token over the answer's length, a panel a prompt length."""
    lengths = sorted({row.tokens for row in benchmark.rows})
    title = f"{benchmark.model_name} on {benchmark.device}"
    figure, all_axes = panels(title, (4.2 * len(lengths) + 1, 4.2), len(lengths))
    handles: dict[str, Any] = {}
    for tokens, axes in zip(lengths, all_axes, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in benchmark.rows:
            if row.tokens == tokens:
                point = row.answer_tokens, row.full_total_s
                if point not in lines.setdefault("transformers", []):
                    lines["transformers"].append(point)
                lines.setdefault(f"ragkv, {setting_name(row)}", []).append(
                    (row.answer_tokens, row.total_s)
                )
        for peer in benchmark.peers:
            if peer.tokens == tokens:
                lines.setdefault(peer.name, []).append((peer.answer_tokens, peer.total_s))
        styles = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
        for (name, points), (colour, marker) in zip(sorted(lines.items()), styles, strict=False):
            drawn = axes.plot(*zip(*sorted(points), strict=True), color=colour, marker=marker)
            handles.setdefault(name, drawn[0])
        axes.set_title(f"prompt of {tokens:,} tokens")
        axes.set_xlabel("answer tokens")
        axes.set_ylim(bottom=0)
    all_axes[0].set_ylabel("seconds to the last token")
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False
    )
    return figure


def _lines(benchmark: Benchmark) -> dict[str, list[BenchRow]]:
    """Group rows by setting; the tier is named where there is more than one."""
    several = len({row.tier for row in benchmark.rows}) > 1
    lines: dict[str, list[BenchRow]] = {}
    for row in benchmark.rows:
        name = setting_name(row) + (f", {row.tier}" if several else "")
        lines.setdefault(name, []).append(row)
    return {name: sorted(rows, key=lambda row: row.tokens) for name, rows in lines.items()}
