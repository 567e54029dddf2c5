"""Draw the pictures of figures that are in ``benchmarks/results``, for light and dark pages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import Result, result_of

HERE = Path(__file__).parent
# of Okabe and Ito, which colour-blind readers tell apart
COLOURS = {"transformers": "#E69F00", "llama.cpp": "#009E73", "ragkv": "#0072B2"}
COLOURS |= {"full prefill": "#E69F00", "vLLM": "#CC79A7", "contextpilot": "#D55E00"}
SPARSE = "#56B4E9"
INKS = {"light": "#24292f", "dark": "#d0d7de"}
WIDTH = 5
"""Inches: letters are 10 pixels high where the page is 400 wide."""

_STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "ragkv"}
_STYLE |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none")


class Bar(NamedTuple):
    """A bar: what stands left of it and at its end, and the end of the thin bar within it."""

    name: str
    value: float
    label: str
    colour: str
    within: float = 0.0


def number(cell: str) -> float:
    """Return the first number in a cell such as ``9.8 s``."""
    return float(cell.split(maxsplit=1)[0])


def speed() -> Figure:
    """Draw first tokens, each peer's beside ragkv's in the same run, and whole answers."""
    own, peers = result_of("first_token_zen_5"), result_of("first_token_other_engines")
    [at] = own.records(tokens="4,096", ratio="0.2", products="float32")
    pairs = [("full prefill", at["full prefill"], at["ragkv"], at["speed-up (quartiles)"])]
    commits = [own.commit]
    for row in peers.records(tokens="4,096", machine="Zen 5"):
        name = row["peer"].partition(",")[0]
        commits.append(f"{row['commit']} ({name})")
        pairs.append((name, row["peer's"], row["ragkv's at 0.2"], row["ragkv is faster by"]))
    firsts = []
    for name, theirs, ours, factor in pairs:
        label = f"{ours}, {factor.partition(' ')[0]} sooner"
        firsts.append(Bar(name, number(theirs), theirs, COLOURS[name]))
        firsts.append(Bar("ragkv", number(ours), label, COLOURS["ragkv"]))
    answers = result_of("whole_answers_quantised")
    figure, plots = _panels([7, 3, 3])
    plots[1].sharex(plots[2])
    _bars(plots[0], "first token, prompt of 4,096: Zen 5, float32", firsts, pairs=True)
    for plot, prompt in zip(plots[1:], ("1,024", "4,096"), strict=True):
        [row] = answers.records(prompt=prompt, answer="256")
        _bars(plot, f"256 tokens, prompt of {prompt}: Zen 4, ragkv quantised", _ends(row))
    words = "Seconds; thin bar: to the first token. SmolLM2-135M; ragkv at a ratio of 0.2; vLLM"
    words += " caches prefixes, the others prefill in full. Two cores of an AMD EPYC each,"
    _caption(figure, f"{words} {', '.join(commits)}, {answers.commit} (answers).")
    return figure


def whole_answers() -> Figure:
    """Draw the seconds of answers of 256 tokens, those to the first token apart."""
    result = result_of("whole_answers_quantised")
    rows = result.records(answer="256")
    figure, plots = _panels([3] * len(rows), sharex=True)
    for plot, row in zip(plots, rows, strict=True):
        _bars(plot, f"prompt of {row['prompt']} tokens", _ends(row))
    _explain(figure, "Seconds to the end of 256 tokens; thin bar: to the first token.", result)
    return figure


def first_token() -> Figure:
    """Draw the seconds to the first token by ratio, below a full prefill's, on each machine."""
    machines = {
        "Zen 4, quantised": ("first_token_zen_4", {"products": "quantised"}),
        "Zen 5, quantised": ("first_token_zen_5", {"products": "quantised"}),
        "AVX-512, float32": ("first_token_avx_512", {"tokens": "4,096", "tier": "memory"}),
    }
    figure, plots = _panels([4] * len(machines), sharex=True)
    for plot, (machine, (name, where)) in zip(plots, machines.items(), strict=True):
        result = result_of(name)
        *_, last = rows = result.records(**where)
        full = last["full prefill"]
        bars = [Bar("full prefill", number(full), full, COLOURS["full prefill"])]
        for row in reversed(rows):
            label = f"{row['ragkv']}, {row['speed-up (quartiles)']}"
            bars.append(Bar(f"ratio {row['ratio']}", number(row["ragkv"]), label, COLOURS["ragkv"]))
        _bars(plot, f"{machine}, {result.commit.partition(';')[0]}", bars)
    words = "Seconds to the first token of 4,096, SmolLM2-135M, and how many times sooner"
    machines_are = "Two cores each of an AMD EPYC, AVX-512 of an older one."
    _caption(figure, f"{words} (quartiles). {machines_are}")
    return figure


def fidelity() -> Figure:
    """Draw the mean KL of each method at each ratio, with its interval."""
    result = result_of("methods_of_2026")
    groups: dict[str, list[tuple[str, str]]] = {"0.2": [], "0.1": [], "0.05": []}
    for row in result.records():
        name, ratio, rest = re.split(r" (0\.\d+)", row["method"])
        groups[ratio].append((name + rest, row["KL to full attention"]))
    figure, plots = _panels([len(rows) for rows in groups.values()], sharex=True)
    for plot, (ratio, rows) in zip(plots, groups.items(), strict=True):
        for at, (name, cell) in enumerate(rows):
            mean, low, high = map(float, re.findall(r"[\d.]+", cell))
            colour = COLOURS["ragkv" if name.startswith("query") else "transformers"]
            plot.plot([low, high], [at, at], color=colour, linewidth=2)
            plot.plot(mean, at, "o", color=colour)
            _label(plot, high, at, f"{mean:.3f}")
        _bare(plot, f"ratio {ratio}", dict(enumerate(name for name, _ in rows)))
    _explain(figure, "KL to full attention, mean and 95% interval, Qwen2.5-Coder-0.5B.", result)
    return figure


def serving() -> Figure:
    """Draw tokens a second and waiting times of each engine before eight clients."""
    result = result_of("serving_8_clients")
    names = {
        "ragkv, 0.2 recomputed": "ragkv",
        "contextpilot 0.5.0 before vLLM": "contextpilot",
        "vLLM 0.32.0": "vLLM",
        "llama.cpp (xllamacpp 2026.10)": "llama.cpp",
    }
    rows = {names[row["engine"]]: row for row in result.records() if row["engine"] in names}
    figure, plots = _panels([len(rows)] * 3)
    made = [(name, row["tokens a second"]) for name, row in rows.items()]
    bars = [Bar(name, number(cell), cell, COLOURS[name]) for name, cell in made]
    _bars(plots[0], "tokens a second", bars)
    for plot, column in zip(plots[1:], ("first token, s", "whole answer, s"), strict=True):
        for at, (name, row) in enumerate(rows.items()):
            half, most = map(float, row[column].split(" / "))
            plot.plot([half, most], [at, at], color=COLOURS[name], linewidth=2)
            plot.plot(half, at, "o", color=COLOURS[name])
            _label(plot, most, at, row[column])
        _bare(plot, f"{column}: p50 (point) / p99", dict(enumerate(rows)))
    _explain(figure, "Eight clients, one trace, SmolLM2-135M; contextpilot before vLLM.", result)
    return figure


def steps() -> Figure:
    """Draw the milliseconds of a step, and what reading its weights and rows takes at least."""
    result = result_of("decoding_long_prompts")
    kinds = {
        "transformers": ("transformers", "", COLOURS["transformers"]),
        "ragkv": ("ragkv", "bound", COLOURS["ragkv"]),
        "ragkv, sparse": ('sparse="auto"', "its bound", SPARSE),
    }
    figure, plots = _panels([3] * len(result.rows))
    for plot, row in zip(plots, result.records(), strict=True):
        bars = [
            Bar(name, row[ms], f"{row[ms]:.0f}", colour, row.get(bound, 0.0))
            for name, (ms, bound, colour) in kinds.items()
        ]
        answers = "one answer" if row["at once"] == 1 else f"{row['at once']} answers"
        _bars(plot, f"{row['prompt']} tokens, {answers}", bars)
    words = "Milliseconds of a step, Qwen2.5-Coder-0.5B; thin bar: what memory's speed allows."
    _explain(figure, words, result)
    return figure


def many_chunks() -> Figure:
    """Draw what many chunks cost a process at its start, in memory, and for each prompt."""
    result = result_of("many_chunks")
    found = dict(zip(result.columns, zip(*result.rows, strict=True), strict=True))
    panels = {
        "start-up, s": {"log and finder": "start s"},
        "MB": {"index on disk": "index MB", "memory": "memory MB"},
        "a prompt, ms": {"poll": "poll ms", "scan": "scan ms"},
    }
    figure, plots = _panels([5] * len(panels), sharex=True)
    for plot, (title, curves) in zip(plots, panels.items(), strict=True):
        for colour, (label, name) in zip((COLOURS["ragkv"], SPARSE), curves.items(), strict=False):
            plot.loglog(found["chunks"], found[name], "o-", ms=3, color=colour)
            lower = found[name][-1] < max(found[each][-1] for each in curves.values())
            _label(plot, found["chunks"][-1], found[name][-1], label, raised=-4 if lower else 4)
        plot.set_title(title, fontsize=9, loc="left")
        plot.spines[["top", "right"]].set_visible(False)
    _explain(figure, "By the number of chunks.", result)
    return figure


def _ends(row: dict[str, Any]) -> list[Bar]:
    """Return a bar for each engine's whole answer, that to its first token within."""
    bars = []
    for name in ("transformers", "llama.cpp", "ragkv"):
        first = row.get(f"{name}, first token", "0 s")
        bars.append(Bar(name, number(row[name]), row[name], COLOURS[name], number(first)))
    return bars


def _panels(rows: list[int], *, sharex: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels, one below the other, each as high as its rows."""
    figure, plots = plt.subplots(
        len(rows),
        figsize=(WIDTH, 0.4 + sum(0.22 * (each + 1.5) for each in rows)),
        height_ratios=rows,
        sharex=sharex,
        layout="constrained",
    )
    return figure, list(plots)


def _bars(plot: Axes, title: str, bars: list[Bar], *, pairs: bool = False) -> None:
    names = {}
    for row, bar in enumerate(bars):
        at = row + row // 2 * 0.5 if pairs else row
        names[at] = bar.name
        plot.barh(at, bar.value, color=bar.colour, height=0.8)
        plot.barh(at, bar.within, color=plt.rcParams["text.color"], height=0.2)
        _label(plot, bar.value, at, bar.label)
    _bare(plot, title, names)


def _label(plot: Axes, x: float, y: float, label: str, raised: float = 0) -> None:
    plot.annotate(label, (x, y), (4, raised), textcoords="offset points", va="center")


def _bare(plot: Axes, title: str, names: dict[float, str]) -> None:
    plot.set_title(title, fontsize=9, loc="left")
    plot.set_yticks(list(names), list(names.values()))
    plot.spines[:].set_visible(False)
    plot.tick_params(length=0, labelbottom=False)
    plot.set_ylim(max(names) + 0.6, -0.6)
    alike = plot.get_shared_x_axes().get_siblings(plot)
    plot.set_xlim(0, 1.4 * max(each.dataLim.x1 for each in alike))


def _explain(figure: Figure, words: str, result: Result) -> None:
    machine = result.machine
    _caption(figure, f"{words} {machine[0].upper()}{machine[1:]}, {result.commit}.")


def _caption(figure: Figure, words: str) -> None:
    figure.supxlabel(textwrap.fill(words, 76), fontsize=8, x=0.01, ha="left", linespacing=1.4)


PICTURES: tuple[Callable[[], Figure], ...] = (
    speed,
    whole_answers,
    first_token,
    fidelity,
    serving,
    steps,
    many_chunks,
)


def save(pictures: Iterable[Callable[[], Figure]], folder: Path = HERE) -> None:
    """Write pictures for light and dark pages, with the same bytes each time."""
    inked = ("text.color", "axes.edgecolor", "xtick.color", "ytick.color")
    for page, ink in INKS.items():
        style: dict[Any, Any] = {**_STYLE, **dict.fromkeys(inked, ink)}
        with plt.rc_context(style):
            for draw in pictures:
                name = f"{draw.__name__.replace('_', '-')}-{page}.svg"
                draw().savefig(folder / name, metadata={"Date": None})
                plt.close("all")


if __name__ == "__main__":
    save(PICTURES)
