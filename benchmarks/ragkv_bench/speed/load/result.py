"""What a load found: percentiles over requests, rates over the run's time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from rich.markup import escape
from rich.table import Table

from ragkv_bench.results import Found, cell, of, table
from ragkv_bench.speed.load.client import ServedAnswer

PERCENTS = (50, 90, 99)
_CAPTION = (
    "p50/p90/p99 in seconds: first token, milliseconds between tokens, whole answer. cached: of "
    "the prompt tokens, as the endpoint counts them."
)


def rows_of(answers: Sequence[ServedAnswer], wall_s: float) -> list[Found]:
    """Return the row of all requests and, where there are several turns, one a turn."""
    turns = sorted({answer.turn for answer in answers})
    groups = {str(turn + 1): [one for one in answers if one.turn == turn] for turn in turns}
    rows = {"all": answers} | (groups if len(turns) > 1 else {})
    return [_row(turns, group, wall_s) for turns, group in rows.items()]


def percentile(values: Sequence[float | None], percent: int) -> float | None:
    """Return a percentile between its neighbours in proportion; None of nothing."""
    known = [value for value in values if value is not None]
    return float(np.percentile(known, percent)) if known else None


def _row(turns: str, answers: Sequence[ServedAnswer], wall_s: float) -> Found:
    """Return percentiles over whole answers, and shares and rates over all of their tokens.

    Inter-token times are a request's mean. ``counted`` are answers whose tokens are counted
    pieces. ``cached_share`` is of the prompt tokens as ``usage`` has them.
    """
    whole = [answer for answer in answers if answer.error is None]
    kinds = Counter(answer.error for answer in answers if answer.error is not None)
    measured = {
        name: [getattr(answer, f"{name}_s") for answer in whole]
        for name in ("ttft", "inter_token", "answer")
    }
    prompt = sum(answer.prompt_tokens for answer in whole)
    completion = sum(answer.completion_tokens for answer in whole)
    sources: Counter[str] = Counter()
    for answer in whole:
        sources.update(answer.sources)
    return {
        "turns": turns,
        "requests": len(answers),
        "errors": len(answers) - len(whole),
        "errors_by_kind": dict(sorted(kinds.items())),
        **{
            f"{name}_p{percent}_s": percentile(values, percent)
            for name, values in measured.items()
            for percent in PERCENTS
        },
        "tokens_per_s": completion / wall_s,
        "requests_per_s": len(whole) / wall_s,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "counted": sum(answer.counted for answer in whole),
        "cached_share": sum(answer.cached_tokens for answer in whole) / max(prompt, 1),
        "sources": {name: count / max(sources.total(), 1) for name, count in sources.items()},
    }


def load_table(results: Sequence[Found]) -> Table:
    """Return one table: a row for all requests of each engine, and one a turn."""
    rows = [
        {"engine": escape(result["name"]) if row["turns"] == "all" else "", **row}
        for result in results
        for row in result["rows"]
    ]
    columns = {
        "engine": of("engine"),
        "turns": of("turns"),
        "first token": _percentiles("ttft", 1),
        "ms/token": _percentiles("inter_token", 1000),
        "answer": _percentiles("answer", 1),
        "tok/s": of("tokens_per_s", ".1f"),
        "req/s": of("requests_per_s", ".2f"),
        "err": lambda row: f"{row['errors']}/{row['requests']}",
        "cached": of("cached_share", ".0%"),
    }
    clients = dict.fromkeys(result["clients"] for result in results)
    title = "; ".join(f"{count} client{'s' * (count != 1)}" for count in clients)
    shown = table(title, _CAPTION, rows, columns, words=2)
    shown.columns[0].no_wrap = False
    return shown


def _percentiles(name: str, scale: int) -> Callable[[Found], str]:
    def shown(row: Found) -> str:
        values = (row[f"{name}_p{percent}_s"] for percent in PERCENTS)
        return "\n".join(cell(value and value * scale, ".3g") for value in values)

    return shown
