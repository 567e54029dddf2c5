"""How the two answers to a question compare, and the tables of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from ragkv.cli.console import out

AGREEMENT_TOKENS = 16
_RIGHT = partial(Column, justify="right")
Answer = Mapping[str, Any]
"""The engine's report of an answer as a dictionary, with its ``text`` and ``token_ids``."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One question, answered by full prefill and by ragkv."""

    question: str
    full: Answer
    ragkv: Answer

    @property
    def speedup(self) -> float:
        """Time to first token of the full prefill over that of ragkv."""
        return self.full["ttft_s"] / self.ragkv["ttft_s"]

    @property
    def agreement(self) -> float:
        """Share of the first 16 answer tokens that are the same, place by place."""
        full, ragkv = (each["token_ids"][:AGREEMENT_TOKENS] for each in (self.full, self.ragkv))
        same = sum(a == b for a, b in zip(full, ragkv, strict=False))
        return same / max(len(full), len(ragkv)) if full or ragkv else 1.0

    def show(self, number: int) -> None:
        """Print the question with both answers and their times."""
        out.print(f"\n[bold]{number:2} {escape(self.question)}[/]", highlight=False)
        for name, answer in (("full", self.full), ("ragkv", self.ragkv)):
            times = f"{answer['ttft_s']:5.2f} s, {answer['total_s']:5.2f} s"
            text = escape(" ".join(answer["text"].split()))
            out.print(f"   [cyan]{name:<5} {times}[/]  {text}", highlight=False)


def figures_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return one framework's figures, ready for JSON."""
    counts = ("prompt", "reused", "recomputed")
    return {
        "ttft_full_s": [pair.full["ttft_s"] for pair in pairs],
        "ttft_ragkv_s": [pair.ragkv["ttft_s"] for pair in pairs],
        "total_full_s": [pair.full["total_s"] for pair in pairs],
        "total_ragkv_s": [pair.ragkv["total_s"] for pair in pairs],
        "speedup_median": statistics.median(pair.speedup for pair in pairs),
        "token_agreement": statistics.fmean(pair.agreement for pair in pairs),
        "answers": [
            {"question": pair.question, "full": pair.full["text"], "ragkv": pair.ragkv["text"]}
            | {f"{name}_tokens": pair.ragkv["tokens"][name] for name in counts}
            for pair in pairs
        ],
    }


def show_pairs(name: str, pairs: Sequence[Pair]) -> None:
    """Print one framework's questions: where prompt tokens came from, times, agreement."""
    columns = ("prompt", "reused", "recomputed", "full s", "ragkv s", "speed-up", "agree")
    table = Table("", *map(_RIGHT, columns), title=f"{name}: time to first token")
    for number, pair in enumerate(pairs, 1):
        tokens = [str(pair.ragkv["tokens"][kind]) for kind in columns[:3]]
        times = f"{pair.full['ttft_s']:.2f}", f"{pair.ragkv['ttft_s']:.2f}", f"{pair.speedup:.1f}x"
        table.add_row(str(number), *tokens, *times, f"{pair.agreement:.0%}")
    out.print("", table)


def show_summary(title: str, frameworks: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the medians of each framework's figures."""
    columns = ("questions", "full s", "ragkv s", "speed-up", "whole answer s", "agree")
    table = Table("framework", *map(_RIGHT, columns), title=title)
    for name, figures in frameworks.items():
        names = ("ttft_full_s", "ttft_ragkv_s", "total_full_s", "total_ragkv_s")
        full, ragkv, *totals = (f"{statistics.median(figures[each]):.2f}" for each in names)
        speedup, agree = f"{figures['speedup_median']:.1f}x", f"{figures['token_agreement']:.0%}"
        count = str(len(figures["answers"]))
        table.add_row(name, count, full, ragkv, speedup, " / ".join(totals), agree)
    out.print("", table)
    out.print(
        "Seconds run from the call to the first token, everything inside; whole answer: to the "
        "last token, full prefill / ragkv. agree: the first 16 tokens.",
        style="dim",
    )
