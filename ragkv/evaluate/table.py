"""The table of an evaluation, for people; it fits 80 columns."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ragkv.evaluate.records import ratio_name
from ragkv.evaluate.summary import Evaluation, Row

_CAPTION = (
    "share: of the cached tokens, recomputed. KL, agree: to full attention's next-token"
    " distributions. kept: of full attention's score, where it scores. TTFT in seconds."
    " Grey: 95 % intervals."
)


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    field: str
    form: str
    interval: str = ""


_COLUMNS = (
    _Column("share", "share_recomputed", "{:.0%}"),
    _Column("KL", "kl", "{:.3f}", "{:.3f}"),
    _Column("agree", "agreement", "{:.0%}"),
    _Column("score", "score", "{:.3f}", "{:.2f}"),
    _Column("kept", "retention", "{:.0%}", "{:.0%}"),
    _Column("TTFT", "ttft_s", "{:.2f}"),
    _Column("speed-up", "speedup", "{:.1f}x", "{:.1f}"),
)


def table(evaluation: Evaluation) -> Table:
    """Return a rich table: one row a method and ratio, intervals below the figures."""
    out = Table(
        title=escape(
            f"{evaluation.model_name} on {evaluation.data}, {evaluation.examples} examples"
        ),
        caption=_CAPTION,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    out.add_column("method", no_wrap=True)
    for column in _COLUMNS:
        out.add_column(column.heading, justify="right", no_wrap=True)
    for row in evaluation.rows:
        out.add_row(_name(row), *(_cell(row, column) for column in _COLUMNS))
    return out


def _name(row: Row) -> str:
    return escape(
        row.method if row.ratio in (0.0, 1.0) else f"{row.method} {ratio_name(row.ratio)}"
    )


def _cell(row: Row, column: _Column) -> str:
    value: float | None = getattr(row, column.field)
    if value is None:
        return "-"
    shown = column.form.format(value)
    low, high = row.ci95.get(column.field, (value, value))
    if not column.interval or low == high:
        return shown
    ends = f"{column.interval.format(low)}-{column.interval.format(high)}"
    return f"{shown}\n[bright_black]{ends.replace('%', '')}[/bright_black]"
