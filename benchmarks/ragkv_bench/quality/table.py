"""The table of an evaluation, for people; it fits 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ragkv_bench.quality.records import ratio_name
from ragkv_bench.quality.summary import Evaluation, SummaryRow

if TYPE_CHECKING:
    from ragkv_bench.quality.codecs import CodecComparison, CodecRow
    from ragkv_bench.quality.recurring import RecurringComparison, RecurringRow

_CAPTION = (
    "share: of the cached tokens, recomputed. KL, agree: to full attention's next-token"
    " distributions. kept: of full attention's score, where it scores. TTFT in seconds."
    " Grey: 95% intervals."
)

_CODEC_CAPTION = (
    "bytes: of a stored token. load: 1,000 tokens. KL raw: to the raw chunks' next-token"
    " distributions; KL, agree: to full attention's. kept: of the raw chunks' score."
)

_RECURRING_CAPTION = (
    "half: of the requests. share: of the cached tokens, recomputed. KL, agree: to full attention's"
    " next-token distributions. Grey: 95% intervals. entries, versions: chunks placed from them."
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
    title = f"{evaluation.model_name} on {evaluation.data}, {evaluation.examples} examples"
    out = _table(title, _CAPTION)
    out.add_column("method", no_wrap=True)
    for column in _COLUMNS:
        out.add_column(column.heading, justify="right", no_wrap=True)
    for row in evaluation.rows:
        out.add_row(_name(row, evaluation.rows), *(_cell(row, column) for column in _COLUMNS))
    return out


def codec_table(comparison: CodecComparison) -> Table:
    """Return a rich table: one row a codec, method by method."""
    out = _table(
        f"{comparison.model} on {comparison.data}, {comparison.examples} examples", _CODEC_CAPTION
    )
    out.add_column("method", no_wrap=True)
    out.add_column("codec", no_wrap=True)
    for heading in ("bytes", "load ms", "KL raw", "KL", "agree", "score", "kept"):
        out.add_column(heading, justify="right", no_wrap=True)
    for row in comparison.rows:
        out.add_row(
            _name(row, comparison.rows),
            row.codec,
            f"{row.bytes_per_token:,.0f}",
            f"{1000 * row.load_s:.1f}",
            f"{row.kl_raw:.5f}",
            f"{row.kl:.3f}",
            f"{row.agreement:.0%}",
            f"{row.score:.3f}",
            "-" if row.retention is None else f"{row.retention:.1%}",
        )
    return out


def recurring_table(comparison: RecurringComparison) -> Table:
    """Return a rich table: a row for each half of the requests, without and with versions."""
    out = _table(
        f"{comparison.model} on {comparison.data}, {comparison.requests} requests",
        _RECURRING_CAPTION,
    )
    out.add_column("method", no_wrap=True)
    for heading in ("half", "versions", "share", "KL", "agree", "entries", "versions"):
        out.add_column(heading, justify="right", no_wrap=True)
    for row in comparison.rows:
        ends = "" if row.kl_ci95 is None else "{:.3f}-{:.3f}".format(*row.kl_ci95)
        out.add_row(
            _name(row, comparison.rows),
            str(row.half),
            "with" if row.versions else "without",
            f"{row.share_recomputed:.0%}",
            f"{row.kl:.3f} [bright_black]{ends}[/bright_black]",
            f"{row.agreement:.0%}",
            str(row.hits.get("entry", 0)),
            str(row.hits.get("version", 0)),
        )
    return out


def _name(
    row: SummaryRow | CodecRow | RecurringRow, rows: Sequence[SummaryRow | CodecRow | RecurringRow]
) -> str:
    """Return the method's name, and its ratio unless the method has just one."""
    ratios = {other.ratio for other in rows if other.method == row.method}
    alone = ratios in ({0.0}, {1.0})
    return escape(row.method if alone else f"{row.method} {ratio_name(row.ratio)}")


def _cell(row: SummaryRow, column: _Column) -> str:
    value: float | None = getattr(row, column.field)
    if value is None:
        return "-"
    shown = column.form.format(value)
    low, high = row.ci95.get(column.field, (value, value))
    if not column.interval or low == high:
        return shown
    ends = f"{column.interval.format(low)}-{column.interval.format(high)}"
    return f"{shown}\n[bright_black]{ends.replace('%', '')}[/bright_black]"


def _table(title: str, caption: str) -> Table:
    """Return a table without rows or columns; brackets in the title are text."""
    return Table(
        title=escape(title),
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
