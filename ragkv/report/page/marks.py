"""A mark for every token of the prompt on the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ragkv.report.page.parts import ORIGINS, SHOWN, Standing, standing
from ragkv.report.words import percent

if TYPE_CHECKING:
    from ragkv.report.account import ReuseReport
    from ragkv.report.trace import Trace

CLASSES = "srcfxvw"
"""The style sheet's names of the origins, in the order of :data:`ORIGINS`."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An element of the page: its classes, its title and its text."""

    kind: str
    title: str
    text: str


def marks(report: ReuseReport, trace: Trace) -> list[Mark | None]:
    """Return ``[tokens]`` marks; of tokens that share characters, the first one has it.

    It has the origin of the token that was computed most. Separate elements would break
    characters of several tokens, such as emoji, and ligatures.
    """
    pieces, stand = trace.pieces(), standing(trace)
    titles = _titles(report, trace, stand)
    out: list[Mark | None] = [None] * len(pieces)
    for first, end in _groups(trace, pieces):
        piece = "".join(pieces[first:end])
        classes = [CLASSES[max(report.positions[first:end], key=SHOWN.index)]]
        if not piece:
            classes.append("e")
        elif "\n" in piece and not piece.strip():
            classes.append("n")
        if level := int(stand.level[first:end].max()):
            classes.append(f"l{level}")
        out[first] = Mark(" ".join(classes), "; ".join(titles[first:end]), piece)
    return out


def _groups(trace: Trace, pieces: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the first token and the end of every run of tokens that has one element.

    A token that shares its characters with the previous one joins its run. A token that covers no
    character, such as BOS, does not.
    """
    covers = trace.offsets[:, 1] > trace.offsets[:, 0]
    starts = [at for at, piece in enumerate(pieces) if piece or not at or not covers[at]]
    yield from zip(starts, [*starts[1:], len(pieces)], strict=True)


def _titles(report: ReuseReport, trace: Trace, stand: Standing) -> list[str]:
    """Return every token's position, origin and, if it has one, score and rank."""
    shares = trace.scores.astype(np.float64)
    if trace.attention:
        shares /= max(float(np.nansum(shares)), 1e-30)
    titles = [f"{at} {ORIGINS[origin]}" for at, origin in enumerate(report.positions)]
    for at in np.flatnonzero(stand.rank):
        value = percent(shares[at]) if trace.attention else f"{shares[at]:.3g}"
        titles[at] += f", {value}, {stand.rank[at]:,} of {stand.scored:,}"
    return titles
