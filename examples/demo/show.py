"""What the demo prints: answers as they come, a table for each framework, a summary."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ragkv.cli.console import out

if TYPE_CHECKING:
    from answer import AnswerPair, DemoFigures
    from run import DemoResult


def show_pair(number: int, pair: AnswerPair) -> None:
    """Print one question with both answers and their times."""
    out.print(f"\n[bold]{number:2} {escape(pair.question)}[/]", highlight=False)
    for name, answer in (("full", pair.full), ("ragkv", pair.ragkv)):
        text = escape(" ".join(answer.text.split()))
        times = f"{answer.ttft_s:5.2f} s, {answer.total_s:5.2f} s"
        out.print(f"   [cyan]{name:<5} {times}[/]  {text}", highlight=False)


def show_figures(name: str, figures: DemoFigures) -> None:
    """Print one framework's questions: where prompt tokens came from, times, agreement."""
    table = Table(title=f"{name}: time to first token")
    table.add_column("")
    for column in ("prompt", "reused", "recomputed", "full s", "ragkv s", "speed-up", "agree"):
        table.add_column(column, justify="right")
    for number, pair in enumerate(figures.pairs, 1):
        table.add_row(
            str(number),
            str(pair.ragkv.prompt_tokens),
            str(pair.ragkv.reused_tokens),
            str(pair.ragkv.recomputed_tokens),
            f"{pair.full.ttft_s:.2f}",
            f"{pair.ragkv.ttft_s:.2f}",
            f"{pair.speedup:.1f}x",
            f"{pair.agreement:.0%}",
        )
    out.print()
    out.print(table)


def show_summary(result: DemoResult) -> None:
    """Print the summary of each framework."""
    table = Table(title=f"{escape(result.model)}, {result.chunks} chunks: medians")
    table.add_column("framework")
    columns = ("questions", "full s", "ragkv s", "speed-up", "whole answer s", "agree")
    for column in columns:
        table.add_column(column, justify="right")
    for name, figures in result.frameworks.items():
        table.add_row(
            name,
            str(len(figures.pairs)),
            f"{statistics.median(figures.ttft_full_s):.2f}",
            f"{statistics.median(figures.ttft_ragkv_s):.2f}",
            f"{figures.speedup_median:.1f}x",
            " / ".join(f"{statistics.median(each):.2f}" for each in figures.totals_s),
            f"{figures.token_agreement:.0%}",
        )
    out.print()
    out.print(table)
    out.print(
        "Seconds run from the call to the first token, everything inside; whole answer: to the "
        "last token, full prefill / ragkv. agree: the first 16 tokens.",
        style="dim",
    )
