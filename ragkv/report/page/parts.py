"""A prompt in parts: the sink, chunk after chunk, and the text between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ragkv.report.account import ReuseReport, Source
    from ragkv.report.trace import Trace

ORIGINS = ("sink", "reused", "recomputed", "fresh", "exact", "repaired", "version")
"""Names of the numbers in ``PromptTokens.origins``."""

SHOWN = (0, 4, 5, 1, 6, 2, 3)
"""The origins, ordered by the computation that a token needed."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of the prompt's tokens: the sink, a chunk, or text between chunks.

    Attributes
    ----------
    title
        Its name, such as ``Chunk 2``.
    start, end
        Its token positions.
    counts
        The number of its tokens by origin, in the order of :data:`ORIGINS`.
    text
        The chunk's text; empty outside chunks.
    score
        A scored chunk's share of the query's attention to cached tokens, or its mean score if
        scores are not attention.
    rank
        The chunk's rank by score, from 1.
    source
        The origin of a chunk's rows.
    """

    title: str
    start: int
    end: int
    counts: tuple[int, ...]
    text: str = ""
    score: float | None = None
    rank: int = 0
    source: Source = "entry"

    @property
    def recomputed(self) -> float:
        """The share of its cached tokens that was recomputed, 0 to 1."""
        cached = sum(self.counts) - self.counts[3]
        return self.counts[2] / max(1, cached)


def parts(report: ReuseReport, trace: Trace) -> list[Part]:
    """Split a prompt into non-empty parts that cover it, in order."""
    origin = np.frombuffer(report.positions, dtype=np.uint8)
    scores = _chunk_scores(report, trace)
    ranks = [1 + sum(other > score for other in scores) for score in scores]
    found: list[Part] = []

    def add(title: str, end: int, **of_chunk: Any) -> None:
        start = found[-1].end if found else 0
        if end > start:
            counts = np.bincount(origin[start:end], minlength=len(ORIGINS)).tolist()
            found.append(Part(title, start, end, tuple(counts), **of_chunk))

    add("Sink", report.tokens.sink)
    for number, use in enumerate(report.chunks):
        add("Between chunks" if number else "Before the chunks", use.start)
        scored = {"score": scores[number], "rank": ranks[number]} if scores else {}
        add(f"Chunk {number + 1}", use.end, text=use.text, source=use.source, **scored)
    add("After the chunks" if report.chunks else "Prompt", len(origin))
    return found


def _chunk_scores(report: ReuseReport, trace: Trace) -> list[float]:
    """Return each chunk's score; empty if no token was scored."""
    if not trace.scored:
        return []
    scores = trace.scores.astype(np.float64)
    total = np.nansum(scores)
    spans = [scores[use.start : use.end] for use in report.chunks]
    if trace.attention:
        return [float(np.nansum(span) / max(total, 1e-30)) for span in spans]
    return [float(np.nansum(span) / max(1, np.isfinite(span).sum())) for span in spans]


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """The ranks of the scored tokens.

    Attributes
    ----------
    scored
        Number of tokens that were scored.
    rank
        ``[tokens]`` int64: rank by score, from 1, the same for equal scores; 0 without a score.
    level
        ``[tokens]`` int64: the number of :data:`TOPS` that include the token, 0 to 5.
    """

    scored: int
    rank: npt.NDArray[np.int64]
    level: npt.NDArray[np.int64]


TOPS = (0.4, 0.2, 0.1, 0.05, 0.02)
"""The levels: the highest 40% of all scores, the highest 20% ..."""


def standing(trace: Trace) -> Standing:
    """Rank the tokens by score. If all scores are equal, every level is 0."""
    rank = np.zeros(len(trace.scores), dtype=np.int64)
    level = np.zeros(len(trace.scores), dtype=np.int64)
    where = np.flatnonzero(~np.isnan(trace.scores))
    if len(where):
        keys = -trace.scores[where].astype(np.float64)
        order = np.sort(keys)
        rank[where] = np.searchsorted(order, keys, side="left") + 1
        share = (np.searchsorted(order, keys, side="right") - 1) / len(where)
        level[where] = (share[:, None] < np.asarray(TOPS)).sum(axis=1)
    return Standing(len(where), rank, level)
