"""Loads as tables for people; they fit 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ragkv_bench.speed.load.result import PERCENTS, LoadResult

_CAPTION = (
    "p50/p90/p99 in seconds: first token, milliseconds between tokens, whole answer. cached: of "
    "the prompt tokens, as the endpoint counts them."
)
_COLUMNS = (
    "engine",
    "turns",
    "first token",
    "ms/token",
    "answer",
    "tok/s",
    "req/s",
    "err",
    "cached",
)


def load_table(results: Sequence[LoadResult]) -> Table:
    """Return one table: a row for all requests of each engine, and one a turn."""
    out = Table(
        title=escape("; ".join(dict.fromkeys(map(shape_of, results)))),
        caption=_CAPTION,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, column in enumerate(_COLUMNS):
        out.add_column(column, justify="left" if index < 2 else "right", no_wrap=index > 0)
    for result in results:
        for row in result.rows:
            times = [
                "\n".join(
                    _number(getattr(row, f"{name}_p{percent}_s"), scale) for percent in PERCENTS
                )
                for name, scale in (("ttft", 1), ("inter_token", 1000), ("answer", 1))
            ]
            everything = row.turns == "all"
            out.add_row(
                escape(result.name) if everything else "",
                row.turns,
                *times,
                f"{row.tokens_per_s:.1f}" if everything else "",
                f"{row.requests_per_s:.2f}" if everything else "",
                f"{row.errors}/{row.requests}",
                f"{row.cached_share:.0%}",
            )
    return out


def shape_of(result: LoadResult) -> str:
    """Say how requests came."""
    if result.clients is None:
        return f"{result.rate:g} requests a second"
    return f"{result.clients} client{'s' * (result.clients != 1)}"


def _number(value: float | None, scale: int) -> str:
    return "-" if value is None else f"{value * scale:.3g}"
