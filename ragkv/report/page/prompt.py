"""The prompt on the page: chunk by chunk, a mark for every token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ragkv.report.page.parts import ORIGINS, SHOWN, Part, Standing, parts, standing
from ragkv.report.words import head, percent, safe, unbroken_count

if TYPE_CHECKING:
    from ragkv.report.account import ReuseReport
    from ragkv.report.trace import Trace

CLASSES = "srcfxvw"
"""The style sheet's names of the origins, in the order of :data:`ORIGINS`."""


def prompt(report: ReuseReport, trace: Trace) -> str:
    """Return the prompt's parts in order."""
    pieces = trace.pieces()
    marks = _marks(report, trace, pieces)
    out = []
    for part in parts(report, trace):
        size = unbroken_count(part.end - part.start, "token")
        tokens = "".join(marks[part.start : part.end])
        shown = f'<div class="tokens" dir="auto">{tokens}</div>'
        if part.text:
            facts = _facts(part, len(report.chunks), attention=trace.attention)
            out.append(
                f'<details class="chunk" open>\n<summary><h3>{part.title}</h3>'
                f'<bdi class="head">{safe(head(part.text))}</bdi>'
                f'<span class="facts"><span>{size}</span>{facts}</span></summary>\n'
                f"{shown}\n</details>"
            )
        else:
            blank = not "".join(pieces[part.start : part.end]).strip()
            title = f"<h3>{part.title} <small>{size}</small></h3>"
            kind = "between blank" if blank else "between"
            out.append(f'<section class="{kind}">{title}\n{shown}\n</section>')
    return "\n".join(out)


def _facts(part: Part, chunks: int, *, attention: bool) -> str:
    if part.source == "history":
        return "<span>from history</span>"
    facts = ["<span>from a version</span>"] if part.source == "version" else []
    facts.append(_meter("recomputed", part.recomputed, "c"))
    if part.score is not None:
        place = f"{part.rank} of {chunks}"
        if attention:
            facts.append(_meter("attention", part.score, "a", place))
        else:
            facts.append(f"<span>by score <b>{place}</b></span>")
    return "".join(facts)


def _meter(name: str, share: float, kind: str, note: str = "") -> str:
    """A share with its name and a bar."""
    after = f" <small>{note}</small>" if note else ""
    return (
        f"<span>{name} <b>{percent(share)}</b>{after}"
        f'<i class="bar {kind}" style="--w:{100 * share:.1f}%"></i></span>'
    )


def _marks(report: ReuseReport, trace: Trace, pieces: list[str]) -> list[str]:
    """Return ``[tokens]`` elements; tokens that share characters have one element.

    It has the origin of the token that was computed most. Separate elements would break
    characters of several tokens, such as emoji, and ligatures.
    """
    stand = standing(trace)
    titles = _titles(report, trace, stand)
    out = [""] * len(pieces)
    for first, end in _groups(trace, pieces):
        piece = "".join(pieces[first:end])
        classes = [CLASSES[max(report.positions[first:end], key=SHOWN.index)]]
        if not piece:
            classes.append("e")
        elif "\n" in piece and not piece.strip():
            classes.append("n")
        if level := int(stand.level[first:end].max()):
            classes.append(f"l{level}")
        title = "; ".join(titles[first:end])
        out[first] = f'<i class="{" ".join(classes)}" title="{title}">{safe(piece)}</i>'
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
