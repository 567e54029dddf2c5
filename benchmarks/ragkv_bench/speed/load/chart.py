"""Loads as a picture: time to first token and to the whole answer, by engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragkv_bench.results import COLOURS, panels
from ragkv_bench.speed.load.result import PERCENTS, LoadResult
from ragkv_bench.speed.load.table import shape_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 0.8
_PANELS = {"ttft": "seconds to the first token", "answer": "seconds to the last token"}


def load_chart(results: Sequence[LoadResult]) -> Figure:
    """Draw p50, p90 and p99 over all requests, a group of bars an engine."""
    title = "; ".join(dict.fromkeys(map(shape_of, results)))
    figure, all_axes = panels(title, (3.0 + 2.0 * len(results), 4.2), len(_PANELS))
    width = _WIDTH / len(PERCENTS)
    for (measure, label), axes in zip(_PANELS.items(), all_axes, strict=True):
        for place, (percent, colour) in enumerate(zip(PERCENTS, COLOURS, strict=False)):
            values = [getattr(one.rows[0], f"{measure}_p{percent}_s") or 0.0 for one in results]
            at = [engine + (place - 1) * width for engine in range(len(results))]
            axes.bar(at, values, width, color=colour, label=f"p{percent}")
        axes.set_xticks(range(len(results)), [one.name for one in results])
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PERCENTS), frameon=False)
    return figure
