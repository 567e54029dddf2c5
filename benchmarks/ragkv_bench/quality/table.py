"""The table of an evaluation, for people."""

from __future__ import annotations

from collections.abc import Callable

from rich.markup import escape
from rich.table import Table

from ragkv_bench import results
from ragkv_bench.quality.records import ratio_name
from ragkv_bench.quality.summary import Evaluation, SummaryRow

_CAPTION = (
    "share: of the cached tokens, recomputed. KL, agree: to full attention's next-token"
    " distributions. kept: of full attention's score, where it scores. TTFT in seconds."
    " Grey: 95% intervals."
)


def table(evaluation: Evaluation) -> Table:
    """Return a rich table: one row a method and ratio, intervals below the figures."""

    def name(row: SummaryRow) -> str:
        """Return the method's name, and its ratio unless the method has just one."""
        ratios = {other.ratio for other in evaluation.rows if other.method == row.method}
        alone = ratios in ({0.0}, {1.0})
        return escape(row.method if alone else f"{row.method} {ratio_name(row.ratio)}")

    columns = {
        "method": name,
        "share": _cell("share_recomputed", "{:.0%}"),
        "KL": _cell("kl", "{:.3f}", "{:.3f}"),
        "agree": _cell("agreement", "{:.0%}"),
        "score": _cell("score", "{:.3f}", "{:.2f}"),
        "kept": _cell("retention", "{:.0%}", "{:.0%}"),
        "TTFT": _cell("ttft_s", "{:.2f}"),
        "speed-up": _cell("speedup", "{:.1f}x", "{:.1f}"),
    }
    title = f"{evaluation.model_name} on {evaluation.data}, {evaluation.examples} examples"
    return results.table(title, _CAPTION, evaluation.rows, columns)


def _cell(field: str, form: str, interval: str = "") -> Callable[[SummaryRow], str]:
    def shown(row: SummaryRow) -> str:
        value: float | None = getattr(row, field)
        if value is None:
            return "-"
        low, high = row.ci95.get(field, (value, value))
        if not interval or low == high:
            return form.format(value)
        ends = f"{interval.format(low)}-{interval.format(high)}"
        return f"{form.format(value)}\n[bright_black]{ends.replace('%', '')}[/]"

    return shown
