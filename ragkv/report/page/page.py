"""The page: the time, the tokens' origin, and the prompt itself."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from ragkv.errors import ConfigError
from ragkv.report.page.parts import ORIGINS, SHOWN, TOPS
from ragkv.report.page.prompt import CLASSES, prompt
from ragkv.report.words import head, percent, safe, seconds, unbroken_count

if TYPE_CHECKING:
    from ragkv.report.account import ReuseReport
    from ragkv.report.trace import Trace

# The policy forbids whatever a text in the prompt might smuggle in: no script, no request.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
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
_SEEN, _LABELLED = 0.002, 0.15
"""Least shares of the time for a segment of the bar, and for its label."""


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
    name = question or f"A prompt of {unbroken_count(report.tokens.prompt, 'token')}"
    blocks = [
        _head(report, name, model),
        _figures(report),
        _times(report, full_prefill_s),
        _legend(report, trace),
        _said(answer),
        _notes(report),
        f'<section class="prompt"><h2>The prompt</h2>\n{prompt(report, trace)}\n</section>',
    ]
    return _PAGE.format(
        title=safe(f"{head(name)} \u2013 ragkv"),
        style=files("ragkv.report.page").joinpath("page.css").read_text(encoding="utf-8"),
        body="\n".join(block for block in blocks if block),
    )


def _head(report: ReuseReport, name: str, model: str) -> str:
    by = f"method <b>{safe(report.method)}</b>" + (f", model <b>{safe(model)}</b>" if model else "")
    return f'<header>\n<h1 dir="auto">{safe(name)}</h1>\n<p>{by}</p>\n</header>'


def _said(answer: str) -> str:
    text = safe(answer.strip())
    whole = f'<section><h2>The answer</h2>\n<blockquote dir="auto">{text}</blockquote>\n</section>'
    return whole if text else ""


def _figures(report: ReuseReport) -> str:
    cached = report.tokens.reused + report.tokens.version + report.tokens.recomputed
    known = report.tokens.cached + report.tokens.recomputed - report.tokens.sink
    asked = report.recompute_ratio
    facts = [
        ("First token after", seconds(report.ttft_s), ""),
        *_whole_answer(report),
        ("Prompt", unbroken_count(report.tokens.prompt, "token"), ""),
        ("Cached", f"{known:,}", f"{percent(known / report.tokens.prompt)} of the prompt"),
        (
            "Recomputed",
            percent(report.effective_ratio) if cached else "\u2013",
            f"of chunks' cached; requested: {asked if isinstance(asked, str) else percent(asked)}",
        ),
    ]
    cells = (
        f"<div><dt>{name}</dt><dd>{value} <small>{note}</small></dd></div>"
        for name, value, note in facts
    )
    return f'<dl class="figures">{"".join(cells)}</dl>'


def _whole_answer(report: ReuseReport) -> list[tuple[str, str, str]]:
    if report.decode.tokens < 2:
        return []
    decode = report.decode
    tokens = f"{unbroken_count(decode.tokens, 'token')}, {decode.ms_per_token:.0f}\u00a0ms each"
    steps = f"; {decode.tokens_per_step:.1f} a step" if decode.accepted else ""
    return [("Whole answer after", seconds(report.total_s), tokens + steps)]


def _notes(report: ReuseReport) -> str:
    notes = [("Auto", report.choice)] if report.choice else []
    if _exact_chunks(report):
        notes.append(("Chunk 1 is exact", _EXACT))
    notes += [("Warning", warning) for warning in report.warnings]
    notes += [
        (f"Not reused ({miss.reason})", f"\u201c{head(miss.chunk)}\u201d {miss.mend}")
        for miss in report.misses
    ]
    rows = (f"<li><b>{safe(name)}</b> <bdi>{safe(text)}</bdi></li>" for name, text in notes)
    return f'<ul class="notes">{"".join(rows)}</ul>' if notes else ""


def _exact_chunks(report: ReuseReport) -> bool:
    """Whether the first chunk's rows are exact and therefore not recomputed."""
    first = next(iter(report.chunks), None)
    if first is None or first.source != "entry" or first.recomputed:
        return False
    return first.start < report.tokens.exact


def _times(report: ReuseReport, full_prefill_s: float | None) -> str:
    total = max(sum(report.steps.values()), 1e-9)
    longest = max(report.ttft_s, full_prefill_s or 0.0, 1e-9)
    width = report.ttft_s / longest
    bar, rows = [], []
    for step, value in report.steps.items():
        colour = f"t{_STEPS.index(step)}" if step in _STEPS else "t0"
        name, share = safe(step.replace("_", " ")), max(0.0, value / total)
        label = f"{name} {seconds(value)}"
        if share > _SEEN:
            shown = label if share * width > _LABELLED else ""
            bar.append(f'<span class="{colour}" style="flex-grow:{share:.4f}">{shown}</span>')
        rows.append(
            f'<li><i class="{colour}"></i><span>{name}</span> <b>{seconds(value)}</b> '
            f"<small>{percent(share, 0)}</small></li>"
        )
    return (
        f"<section><h2>Until the first token: {seconds(report.ttft_s)}</h2>\n"
        f'<div class="stack times" aria-hidden="true" style="width:{width:.1%}">'
        f"{''.join(bar)}</div>\n"
        f'<ol class="keys">{"".join(rows)}</ol>\n{_full_prefill(report, full_prefill_s, longest)}'
        "</section>"
    )


def _full_prefill(report: ReuseReport, took: float | None, longest: float) -> str:
    """The time of a full prefill, next to the report's."""
    if took is None:
        return ""
    times = f"{took / max(report.ttft_s, 1e-9):.1f}"
    return (
        f'<p class="full"><b>A full prefill of this prompt: {seconds(took)}</b>, {times} times as '
        "long: measured once, on this machine, after the answer.</p>\n"
        f'<div class="stack times" aria-hidden="true" style="width:{took / longest:.1%}">'
        f'<span class="t5" style="flex-grow:1">full prefill {seconds(took)}</span></div>\n'
    )


def _legend(report: ReuseReport, trace: Trace) -> str:
    counts = [report.positions.count(origin) for origin in range(len(ORIGINS))]
    bar, rows = [], []
    for origin in SHOWN:
        name, number, kind = ORIGINS[origin], counts[origin], CLASSES[origin]
        if not number and name in _RARE:
            continue
        if number:
            bar.append(f'<i class="{kind}" style="flex-grow:{number}"></i>')
        rows.append(
            f'<li><i class="{kind}">{name}</i> <b>{number:,}</b> '
            f"<small>{percent(number / report.tokens.prompt)}<br>{_MEANING[name]}</small></li>"
        )
    return (
        "<section><h2>Origin of the tokens</h2>\n"
        f'<div class="stack origins" aria-hidden="true">{"".join(bar)}</div>\n'
        f'<ul class="keys legend">{"".join(rows)}</ul>\n{_scale(report, trace)}</section>'
    )


def _scale(report: ReuseReport, trace: Trace) -> str:
    """The key to the bars under scored tokens."""
    if not trace.scored:
        return ""
    what = (
        "the query's attention to it"
        if trace.attention
        else f"the score that {safe(report.method)} gave it"
    )
    levels = "".join(
        f'<i class="r l{level}">top {percent(top, 0)}</i> ' for level, top in enumerate(TOPS, 1)
    )
    return (
        f'<p class="scale">The bar under a cached token is {what}, by rank among all of them:'
        f"<span>{levels}</span></p>\n"
    )
