"""Draw the ideas of ``docs/concepts.md``, on light and dark pages."""

from __future__ import annotations

import numpy as np
from draw import save
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# of Okabe and Ito, as the page of `ragkv ask --page` has them
FILLS = {
    "sink": "#8a96a3",
    "cached": "#56B4E9",
    "exact": "#009E73",
    "recomputed": "#E69F00",
    "fresh": "none",
}
WIDTH = 6.4
"""Inches, so that words can be read on a phone."""
INK = "#16202a"
"""What is written on a fill, on either page."""


def _panel(height: float) -> tuple[Figure, Axes]:
    """Return a picture without axes, in which x runs to 100 and y to 10 an inch."""
    figure, plot = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    plot.set(xlim=(0, 100), ylim=(0, height * 10))
    plot.axis("off")
    return figure, plot


def _block(plot: Axes, x: float, y: float, width: float, kind: str, label: str = "") -> None:
    """Draw tokens as a block of height 4."""
    ink = plt.rcParams["text.color"]
    edge = ink if kind == "fresh" else "none"
    plot.add_patch(plt.Rectangle((x, y), width - 0.4, 4, facecolor=FILLS[kind], edgecolor=edge))
    colour = ink if kind == "fresh" else INK
    plot.text(x + width / 2 - 0.2, y + 1.9, label, ha="center", va="center", color=colour)


def _chosen(plot: Axes, x: float, y: float, *places: float) -> None:
    """Mark tokens of a block as recomputed."""
    for place in places:
        plot.add_patch(plt.Rectangle((x + place, y), 0.7, 4, facecolor=FILLS["recomputed"]))


def _arrow(plot: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": plt.rcParams["text.color"], "lw": 0.8}
    plot.annotate("", xy=end, xytext=start, arrowprops={**style, "shrinkA": 0, "shrinkB": 1})


def _say(plot: Axes, x: float, y: float, words: str, *, size: float = 9) -> None:
    plot.text(x, y, words, fontsize=size, va="center")


def idea() -> Figure:
    """Draw chunks that are encoded once, and a prompt that has them in another order."""
    figure, plot = _panel(3.3)
    _say(plot, 0, 31, "Once, at ingestion: each chunk is encoded behind the sink")
    for at, name in zip((0, 36, 72), "ABC", strict=True):
        _block(plot, at, 25, 8, "sink", "sink")
        _block(plot, at + 8, 25, 20, "cached", f"chunk {name}")
    _say(plot, 0, 16, "In a prompt, in any order")
    _block(plot, 0, 8, 8, "sink", "sink")
    _block(plot, 8, 8, 20, "cached", "chunk C")
    _block(plot, 28, 8, 3, "fresh")
    _block(plot, 31, 8, 20, "cached", "chunk A")
    _chosen(plot, 31, 8, 1.4, 2.6, 3.8, 17)
    _block(plot, 51, 8, 3, "fresh")
    _block(plot, 54, 8, 20, "cached", "chunk B")
    _chosen(plot, 54, 8, 0.9, 2.1, 15.6, 17.3)
    _block(plot, 74, 8, 26, "fresh", "question")
    _arrow(plot, (90, 24.7), (24, 12.3))
    _arrow(plot, (18, 24.7), (45, 12.3))
    _arrow(plot, (54, 24.7), (66, 12.3))
    legend = {"cached": "loaded, rotated", "recomputed": "recomputed", "fresh": "computed"}
    for at, (kind, words) in zip((0, 36, 72), legend.items(), strict=True):
        _block(plot, at, 1, 3, kind)
        _say(plot, at + 4, 3, words)
    return figure


def sink() -> Figure:
    """Draw what a chunk's tokens saw when they were encoded, and what precedes them in a prompt."""
    figure, plot = _panel(2.2)
    _say(plot, 0, 18.5, "encoded")
    _block(plot, 18, 16.5, 10, "sink", "sink")
    _block(plot, 28, 16.5, 22, "cached", "chunk A")
    _block(plot, 62, 16.5, 10, "sink", "sink")
    _block(plot, 72, 16.5, 22, "cached", "chunk B")
    _say(plot, 0, 8, "in a prompt")
    _block(plot, 18, 6, 10, "sink", "sink")
    _block(plot, 28, 6, 22, "exact", "chunk A")
    _block(plot, 50, 6, 22, "cached", "chunk B")
    _block(plot, 72, 6, 22, "fresh", "question")
    _arrow(plot, (39, 16.2), (39, 10.4))
    _arrow(plot, (83, 16.2), (61, 10.4))
    _say(plot, 28, 2.5, "saw all that is\nbefore it: exact", size=8)
    _say(plot, 50, 2.5, "did not see\nchunk A: stale", size=8)
    return figure


def placing() -> Figure:
    """Draw keys without a position, and their rotation to the one that a prompt gives them."""
    figure, plot = _panel(1.9)
    _say(plot, 0, 15.5, "in the store")
    _block(plot, 18, 13.5, 24, "cached", "not rotated")
    _say(plot, 0, 5, "in prompts")
    _block(plot, 18, 3, 4, "sink")
    _block(plot, 22, 3, 22, "cached", "by 24 to 423")
    _block(plot, 54, 3, 4, "sink")
    _block(plot, 58, 3, 16, "cached", "chunk B")
    _block(plot, 74, 3, 26, "cached", "by 824 to 1223")
    _arrow(plot, (26, 13.2), (32, 7.4))
    _arrow(plot, (36, 13.2), (84, 7.4))
    return figure


def repair() -> Figure:
    """Draw the scores of cached tokens, and those that the ratio allows to recompute."""
    figure, plot = _panel(2.1)
    random = np.random.default_rng(4)
    count = 76
    scores = np.convolve(random.gamma(0.35, 1.0, count), [0.2, 0.6, 0.2], mode="same")
    best = np.argsort(scores)[-count // 5 :]
    for token, score in enumerate(scores / scores.max()):
        kind = "recomputed" if token in best else "cached"
        at = 24 + token
        plot.add_patch(plt.Rectangle((at, 8), 0.8, 0.4 + 11 * score, facecolor=FILLS[kind]))
        plot.add_patch(plt.Rectangle((at, 3), 0.8, 3.4, facecolor=FILLS[kind]))
    _say(plot, 0, 13, "attention of\nthe question")
    _say(plot, 0, 4.7, "cached tokens")
    _say(plot, 24, 0.8, "at a ratio of 0.2 the fifth with the highest scores is recomputed", size=8)
    return figure


def drift() -> Figure:
    """Draw how far rows are from a full prefill's, and the estimate from recomputed ones."""
    figure, plot = plt.subplots(figsize=(WIDTH, 2.0), layout="constrained")
    random = np.random.default_rng(1)
    tokens = np.arange(120)
    shift = np.convolve(random.normal(0, 1, 160), np.hanning(41) / 6, mode="valid")
    noisy = shift + random.normal(0, 0.12, 120)
    known = np.sort(random.choice(tokens, 24, replace=False))
    ink = plt.rcParams["text.color"]
    plot.vlines(tokens, 0, noisy, color=FILLS["cached"], lw=2)
    plot.vlines(known, 0, noisy[known], color=FILLS["recomputed"], lw=2)
    plot.plot(tokens, np.interp(tokens, known, noisy[known]), color=ink, lw=1)
    plot.axhline(0, color=ink, lw=0.5)
    plot.set_axis_off()
    words = "how far each token's row moved; line: the estimate from recomputed tokens"
    plot.set_title(words, fontsize=8, loc="left")
    return figure


def tree() -> Figure:
    """Draw prompts that begin alike and share rows, some made exact in idle time."""
    figure, plot = _panel(2.6)
    _block(plot, 0, 11, 10, "sink", "sink")
    rows = (("exact", "A", 18.5, 0), ("exact", "B", 21.5, 1), ("cached", "C", 15.5, 1))
    for kind, label, y, column in (*rows, ("cached", "C", 5.5, 0), ("cached", "A", 5.5, 1)):
        _block(plot, 17 + 26 * column, y, 19, kind, label)
        if y < 10:
            _chosen(plot, 17 + 26 * column, y, 2, 4, 14)
    for number, y in enumerate((21.5, 15.5, 5.5), 1):
        _block(plot, 69, y, 20, "fresh", f"question {number}")
        _arrow(plot, (62, y + 2), (68.5, y + 2))
    for end in (20.5, 7.5):
        _arrow(plot, (10, 13), (16.5, end))
    for start, end in ((20.5, 23.5), (20.5, 17.5), (7.5, 7.5)):
        _arrow(plot, (36, start), (42.5, end))
    _say(plot, 0, 2, "green: healed, so exact for the next question over A, B", size=8)
    return figure


def tiers() -> Figure:
    """Draw where a chunk's cache is read from."""
    figure, plot = _panel(1.7)
    notes = {"device": "of a GPU: hot chunks", "memory": "an eighth of it"}
    for at, (name, note) in enumerate({**notes, "store": "folder, Redis, S3: all"}.items()):
        _block(plot, 36 * at, 8, 28, "sink" if name == "store" else "cached", name)
        _say(plot, 36 * at, 5.5, note, size=8)
    _arrow(plot, (71.5, 10), (64.2, 10))
    _arrow(plot, (35.5, 10), (28.2, 10))
    _say(plot, 0, 15, "what is asked for is copied upwards; what is worth least is evicted", size=8)
    _say(plot, 0, 1.5, "what would load slower than it is computed is computed", size=8)
    return figure


PICTURES = (idea, sink, placing, repair, drift, tree, tiers)

if __name__ == "__main__":
    save(PICTURES)
