"""The page: the time, the tokens' origin, and the prompt itself."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined, Template

from ragkv.errors import ConfigError
from ragkv.report.page.marks import CLASSES, marks
from ragkv.report.page.parts import ORIGINS, SHOWN, TOPS, parts
from ragkv.report.words import head, percent, safe, seconds, unbroken_count

if TYPE_CHECKING:
    from ragkv.report.account import ReuseReport

_MEANING = {
    "sink": "the head that all prompts share",
    "reused": "from the chunk's stored entry",
    "recomputed": "cached, and recomputed for this prompt",
    "fresh": "not cached: the query, and the text between chunks",
    "exact": "from an earlier prompt, equal to a full prefill's",
    "repaired": "from an earlier prompt, which recomputed it",
    "version": "computed earlier behind other chunks",
}
_EXACT = (
    "It is directly behind the sink, as when it was encoded. Its cached rows equal a full "
    "prefill's, so the whole ratio is spent on the chunks behind it."
)
_RARE = ("exact", "repaired", "version")
"""Origins that the legend omits if the prompt has no such token."""
_STEPS = ("wait", "find", "load", "splice", "select", "recompute", "first_token")
"""Steps with a colour in the style sheet."""


def page(
    report: ReuseReport,
    *,
    question: str = "",
    model: str = "",
    answer: str = "",
    full_prefill_s: float | None = None,
) -> str:
    """Return an HTML page of the prompt, with each token's origin.

    The page has no scripts and no external resources. Write it as UTF-8.

    Parameters
    ----------
    question, model, answer
        Shown at the top; omitted if empty.
    full_prefill_s
        Seconds of a full prefill of the prompt on the same machine, such as
        ``kv.prefill(prompt, method="full").report.ttft_s``, for comparison.

    Raises
    ------
    ConfigError
        The report has no trace: it does not come from an engine.
    """
    if (trace := report.trace) is None:
        raise ConfigError(
            "this report has no trace of its prompt: give the engine's report, not a copy from "
            "from_dict()"
        )
    longest = max(report.ttft_s, full_prefill_s or 0.0, 1e-9)
    return _template().render(
        report=report,
        trace=trace,
        name=question or f"A prompt of {unbroken_count(report.tokens.prompt, 'token')}",
        model=model,
        answer=answer,
        full_prefill_s=full_prefill_s,
        longest=longest,
        width=report.ttft_s / longest,
        steps=_steps(report),
        legend=_legend(report),
        tops=TOPS,
        notes=_notes(report),
        parts=parts(report, trace),
        marks=marks(report, trace),
        style=_file("page.css"),
    )


@cache
def _template() -> Template:
    made = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    made.filters |= {"exact": safe, "head": head, "seconds": seconds, "percent": percent}
    made.filters["count"] = unbroken_count
    return made.from_string(_file("page.html"))


def _file(name: str) -> str:
    return files("ragkv.report.page").joinpath(name).read_text(encoding="utf-8")


def _steps(report: ReuseReport) -> list[dict[str, Any]]:
    total = max(sum(report.steps.values()), 1e-9)
    return [
        {
            "name": step.replace("_", " "),
            "colour": f"t{_STEPS.index(step)}" if step in _STEPS else "t0",
            "seconds": value,
            "share": max(0.0, value / total),
        }
        for step, value in report.steps.items()
    ]


def _legend(report: ReuseReport) -> list[dict[str, Any]]:
    counts = [(origin, report.positions.count(origin)) for origin in SHOWN]
    return [
        {
            "name": ORIGINS[origin],
            "kind": CLASSES[origin],
            "meaning": _MEANING[ORIGINS[origin]],
            "number": number,
        }
        for origin, number in counts
        if number or ORIGINS[origin] not in _RARE
    ]


def _notes(report: ReuseReport) -> list[tuple[str, str]]:
    notes = [("Auto", report.choice)] if report.choice else []
    if _exact_chunks(report):
        notes.append(("Chunk 1 is exact", _EXACT))
    notes += [("Warning", warning) for warning in report.warnings]
    return notes + [
        (f"Not reused ({miss.reason})", f"\u201c{head(miss.chunk)}\u201d {miss.mend}")
        for miss in report.misses
    ]


def _exact_chunks(report: ReuseReport) -> bool:
    """Whether the first chunk's rows are exact and therefore not recomputed."""
    first = next(iter(report.chunks), None)
    if first is None or first.source != "entry" or first.recomputed:
        return False
    return first.start < report.tokens.exact
