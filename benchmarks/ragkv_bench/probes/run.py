"""Methods x ratios on sets of probes: how often they are right, and where they differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.markup import escape
from rich.table import Table

from ragkv.select import Method
from ragkv_bench import results
from ragkv_bench.data.examples import Example
from ragkv_bench.data.tasks import TASKS
from ragkv_bench.probes.sets import ProbeSet
from ragkv_bench.quality.intervals import wilson
from ragkv_bench.quality.records import EvalRecord, Ratio, RecordFile, ratio_name
from ragkv_bench.quality.run import measurements, usable
from ragkv_bench.quality.subject import FULL

if TYPE_CHECKING:
    from ragkv import RagKV

_COPIED = ("copy", "needle", "words")
"""Kinds of task whose answers stand in the documents."""
_CAPTION = (
    "rate: of right answers, 95% interval in grey. KL: to full attention, mean and worst example."
    " in copy: answers that first differ from full attention's inside a copied name or number."
)


def evaluate_probes(
    kv: RagKV,
    sets: Sequence[ProbeSet],
    *,
    methods: Sequence[str | Method],
    ratios: Sequence[Ratio],
    records: str | Path | None = None,
    show_progress: bool = False,
) -> results.Found:
    """Measure methods, and full attention, on every set; return what ``--json`` writes.

    The arguments are those of :func:`ragkv_bench.quality.run.evaluate`.
    """
    settings, file = usable(kv, methods, ratios), RecordFile(records)
    rows: list[results.Found] = []
    for each in sets:
        how = {"time_in_turn": False, "whole_answers": True, "show_progress": show_progress}
        done = measurements(kv, each.data, settings, file, **how)
        rows += summarise(each, done)
    return {"model": kv.info.name, "rows": rows}


def summarise(of: ProbeSet, records: Sequence[EvalRecord]) -> list[results.Found]:
    """Return a row for every method and ratio, in order of appearance."""
    groups: dict[tuple[str, Ratio], dict[str, EvalRecord]] = {}
    for record in records:
        groups.setdefault((record.method, record.ratio), {})[record.id] = record
    full = groups[FULL, 1.0]
    return [
        {"probe": of.probe, "method": method, "ratio": ratio, "tokens": of.tokens}
        | _figures(of.kinds, group, full)
        for (method, ratio), group in groups.items()
    ]


def _figures(
    kinds: Mapping[str, Sequence[Example]],
    group: Mapping[str, EvalRecord],
    full: Mapping[str, EvalRecord],
) -> results.Found:
    examples = {kind: [each for each in of if each.id in group] for kind, of in kinds.items()}
    rates = {
        kind: float(np.mean([group[each.id].score for each in of]))
        for kind, of in examples.items()
        if of
    }
    kl = [record.kl for record in group.values()]
    rate = float(np.mean([record.score for record in group.values()]))
    low, high = wilson(rate, len(group))
    copied = [
        differs_in_copy(full[each.id].answer, group[each.id].answer, each.answers)
        for of in examples.values()
        for each in of
        if TASKS[each.task].kind in _COPIED
    ]
    return {
        "n": len(group),
        "rate": rate,
        "rate_low": low,
        "rate_high": high,
        "kl": float(np.mean(kl)),
        "kl_worst": max(kl),
        "differs_in_copy": float(np.mean(copied)) if copied else None,
        "kinds": rates,
    }


def differs_in_copy(full: str, answer: str, copies: Sequence[str]) -> bool:
    """Whether the first difference from full attention's answer lies inside one of its copies.

    A copy that goes on where full attention's ends (123 and 1234) differs inside, too.
    """
    pairs = enumerate(zip(full, answer, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(full), len(answer)))
    goes_on = answer[at : at + 1].isalnum()
    return full != answer and any(
        found.start() <= at < found.end() + goes_on
        for copy in copies
        for found in re.finditer(re.escape(copy), full)
    )


def table(found: results.Found) -> Table:
    """Return a rich table: a line a row, intervals below the rates."""

    def rate(row: results.Found) -> str:
        ends = results.grey((row["rate_low"], row["rate_high"]), ".0%")
        return f"{results.cell(row['rate'], '.0%')}\n{ends}"

    columns = {
        "probe": results.of("probe"),
        "method": lambda row: escape(f"{row['method']} {ratio_name(row['ratio'])}"),
        "tokens": results.of("tokens"),
        "n": results.of("n"),
        "rate": rate,
        "KL": results.of("kl", ".3f"),
        "worst": results.of("kl_worst", ".3f"),
        "in copy": results.of("differs_in_copy", ".0%"),
    }
    title = f"{results.short_name(found['model'])}, probes"
    return results.table(title, _CAPTION, found["rows"], columns, words=2)
