"""Draw the pictures of figures that are in ``benchmarks/results``, on light and dark pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
# of Okabe and Ito, which colour-blind readers tell apart
COLOURS = {"transformers": "#E69F00", "llama.cpp": "#009E73", "ragkv": "#0072B2"}
SPARSE = "#56B4E9"
PAGES = {"light": ("#ffffff", "#24292f"), "dark": ("#0d1117", "#d0d7de")}

_TEXT = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "ragkv"}


def result_of(name: str) -> dict[str, Any]:
    """Return a result: its rows, and where they were measured."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def seconds(cell: str) -> float:
    """Return the number in a cell such as ``9.8 s``."""
    return float(cell.split(maxsplit=1)[0])


def whole_answers() -> Figure:
    """Draw the seconds of answers of 256 tokens, those to the first token apart."""
    result = result_of("whole_answers_quantised")
    rows = [row for row in result["rows"] if row[1] == "256"]
    figure, plots = plt.subplots(1, len(rows), figsize=(9, 2.3), layout="constrained")
    for plot, row in zip(plots, rows, strict=True):
        ends = {"transformers": row[2], "llama.cpp": row[10], "ragkv": row[6]}
        firsts = {"llama.cpp": row[8], "ragkv": row[3]}
        for name, end in ends.items():
            bar = plot.barh(name, seconds(end), color=COLOURS[name], height=0.7)
            plot.bar_label(bar, [end], padding=3)
            if name in firsts:
                plot.barh(name, seconds(firsts[name]), color=plt.rcParams["text.color"], height=0.2)
        plot.set_title(f"prompt of {row[0]} tokens", fontsize=9)
        plot.invert_yaxis()
        _bare(plot, named=plot is plots[0])
    _explain(figure, "Seconds to the end of 256 tokens; thin bar: to the first token.", result)
    return figure


def steps() -> Figure:
    """Draw the milliseconds of a step, and what reading its weights and rows takes at least."""
    result = result_of("decoding_steps")
    sizes = [("8,192", 1), ("8,192", 4), ("32,000", 1), ("32,000", 4)]
    figure, plots = plt.subplots(1, len(sizes), figsize=(9, 2.3), layout="constrained")
    for plot, size in zip(plots, sizes, strict=True):
        for _, engine, _, sparse, *at, ms, _, bound, _ in result["rows"]:
            if tuple(at) != size:
                continue
            name = "ragkv, sparse" if sparse == "auto" else engine
            bar = plot.barh(name, ms, color=SPARSE if sparse == "auto" else COLOURS[engine])
            plot.bar_label(bar, [f"{ms:.0f}"], padding=3)
            if bound:
                plot.barh(name, bound, color=plt.rcParams["text.color"], height=0.2)
        answers = "one answer" if size[1] == 1 else f"{size[1]} answers"
        plot.set_title(f"{size[0]} tokens, {answers}", fontsize=9)
        plot.invert_yaxis()
        _bare(plot, named=plot is plots[0])
    words = "Milliseconds of a step, Qwen2.5-Coder-0.5B; thin bar: what memory's speed allows."
    _explain(figure, words, result)
    return figure


def many_chunks() -> Figure:
    """Draw what many chunks cost a process at its start, in memory, and for each prompt."""
    result = result_of("many_chunks")
    found = dict(zip(result["columns"], zip(*result["rows"], strict=True), strict=True))
    panels = {
        "start-up, s": {"log and finder": "start s"},
        "MB": {"index on disk": "index MB", "memory": "memory MB"},
        "a prompt, ms": {"poll": "poll ms", "scan": "scan ms"},
    }
    figure, plots = plt.subplots(1, len(panels), figsize=(9, 2.6), layout="constrained")
    for plot, (title, curves) in zip(plots, panels.items(), strict=True):
        for colour, (label, name) in zip(COLOURS.values(), curves.items(), strict=False):
            plot.loglog(found["chunks"], found[name], "o-", ms=3, color=colour, label=label)
        plot.set_title(title, fontsize=9)
        plot.spines[["top", "right"]].set_visible(False)
        plot.legend(frameon=False, fontsize=8)
    _explain(figure, "By the number of chunks.", result)
    return figure


def _bare(plot: Axes, *, named: bool) -> None:
    plot.spines[:].set_visible(False)
    plot.tick_params(length=0, labelbottom=False, labelleft=named)
    plot.margins(x=0.25)


def _explain(figure: Figure, words: str, result: dict[str, Any]) -> None:
    machine, commit = result["machine"], result["commit"].partition(";")[0]
    figure.supxlabel(f"{words} {machine[0].upper()}{machine[1:]}, {commit}.", fontsize=8)


def main(folder: Path = HERE) -> None:
    """Write every picture for every page, with the same bytes each time."""
    for page, (ground, ink) in PAGES.items():
        inks = dict.fromkeys(("text.color", "xtick.color", "ytick.color"), ink)
        grounds = dict.fromkeys(("figure.facecolor", "axes.facecolor"), ground)
        with plt.rc_context({**_TEXT, **inks, **grounds}):
            for draw in (whole_answers, steps, many_chunks):
                name = f"{draw.__name__.replace('_', '-')}-{page}.svg"
                draw().savefig(folder / name, metadata={"Date": None})
                plt.close("all")


if __name__ == "__main__":
    main()
