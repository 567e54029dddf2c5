"""What a load found: percentiles over requests, rates over the run's time."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ragkv_bench.results import reading, write
from ragkv_bench.speed.load.answer import ServedAnswer

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class LoadRow:
    """All requests of a run, or those of one turn.

    Attributes
    ----------
    turns
        ``all``, or which turn of their conversation the requests are: ``1``, ``2`` ...
    requests, errors
        Asked, and of these without a whole answer; ``errors_by_kind`` names them by status.
    ttft_p50_s, inter_token_p50_s, longest_gap_p50_s, answer_p50_s
        Percentiles over whole answers; None where there is none. Inter-token times are a
        request's mean, the longest gap its worst.
    tokens_per_s, requests_per_s
        Completion tokens and whole answers over the run's seconds.
    counted
        Answers whose tokens are counted pieces, since the endpoint sent no usage.
    cached_share
        Cached tokens over prompt tokens as ``usage`` has them.
    sources
        Share of the prompt tokens by where they came from, of endpoints that say so.
    """

    turns: str
    requests: int
    errors: int
    errors_by_kind: dict[str, int]
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p90_s: float | None
    inter_token_p99_s: float | None
    longest_gap_p50_s: float | None
    longest_gap_p90_s: float | None
    longest_gap_p99_s: float | None
    answer_p50_s: float | None
    answer_p90_s: float | None
    answer_p99_s: float | None
    tokens_per_s: float
    requests_per_s: float
    prompt_tokens: int
    completion_tokens: int
    counted: int
    cached_share: float
    sources: dict[str, float]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One run against one endpoint, which ``name`` names in tables and charts.

    Attributes
    ----------
    clients, rate
        Of a closed loop the clients, of an open one the requests a second.
    wall_s
        Seconds from the first request to the last answer.
    precompute_s
        Seconds to precompute the documents; None where that was not done.
    """

    name: str
    clients: int | None
    rate: float | None
    wall_s: float
    precompute_s: float | None
    rows: tuple[LoadRow, ...]
    setup: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> LoadResult:
        """Read what :meth:`save` wrote.

        Raises
        ------
        ConfigError
            The file cannot be read or is not such a result.
        """
        with reading(path, "{path} is not by `ragkv bench serve`: {error!r}") as saved:
            return cls(**saved | {"rows": tuple(LoadRow(**row) for row in saved["rows"])})


def rows_of(answers: Sequence[ServedAnswer], wall_s: float) -> tuple[LoadRow, ...]:
    """Return the row of all requests and, where there are several turns, one a turn."""
    turns = sorted({answer.turn for answer in answers})
    rows = [_row("all", answers, wall_s)]
    if len(turns) > 1:
        rows += [
            _row(str(turn + 1), [one for one in answers if one.turn == turn], wall_s)
            for turn in turns
        ]
    return tuple(rows)


def percentile(values: Iterable[float], percent: int) -> float | None:
    """Return a percentile, 1 to 99, between its neighbours in proportion; None of nothing."""
    found = list(values)
    if len(found) < 2:
        return found[0] if found else None
    return statistics.quantiles(found, n=100, method="inclusive")[percent - 1]


def _row(turns: str, answers: Sequence[ServedAnswer], wall_s: float) -> LoadRow:
    whole = [answer for answer in answers if answer.error is None]
    kinds = Counter(answer.error for answer in answers if answer.error is not None)
    measured: dict[str, list[float | None]] = {
        "ttft": [answer.ttft_s for answer in whole],
        "inter_token": [answer.inter_token_s for answer in whole],
        "longest_gap": [
            answer.longest_gap_s if answer.completion_tokens > 1 else None for answer in whole
        ],
        "answer": [answer.answer_s for answer in whole],
    }
    percentiles = {
        f"{name}_p{percent}_s": percentile((one for one in values if one is not None), percent)
        for name, values in measured.items()
        for percent in PERCENTS
    }
    prompt = sum(answer.prompt_tokens for answer in whole)
    completion = sum(answer.completion_tokens for answer in whole)
    sources: Counter[str] = Counter()
    for answer in whole:
        sources.update(answer.sources)
    return LoadRow(
        turns=turns,
        requests=len(answers),
        errors=len(answers) - len(whole),
        errors_by_kind=dict(sorted(kinds.items())),
        **percentiles,
        tokens_per_s=completion / wall_s,
        requests_per_s=len(whole) / wall_s,
        prompt_tokens=prompt,
        completion_tokens=completion,
        counted=sum(answer.counted for answer in whole),
        cached_share=sum(answer.cached_tokens for answer in whole) / max(prompt, 1),
        sources={name: count / max(sources.total(), 1) for name, count in sources.items()},
    )
