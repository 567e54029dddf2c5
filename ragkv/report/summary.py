"""A report in a few lines, and its misses in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ragkv.report.plural import count
from ragkv.report.reasons import REASONS

if TYPE_CHECKING:
    from ragkv.report.account import Miss, ReuseReport

MOST_LINES = 10
"""Lines of a summary."""


def summary(report: ReuseReport) -> str:
    """Return where tokens and time went, and what was not reused and why."""
    sources = {
        "sink": report.tokens.sink,
        "exact from former prompts": report.tokens.history_exact,
        "repaired by former prompts": report.tokens.history_repaired,
        "reused": report.tokens.reused,
        "from versions": report.tokens.version,
        "recomputed": report.tokens.recomputed,
        "not cached": report.tokens.fresh,
    }
    tokens = ", ".join(f"{number:,} {name}" for name, number in sources.items() if number)
    steps = ", ".join(f"{name} {seconds:.3f}" for name, seconds in report.steps.items())
    asked = report.recompute_ratio
    asked = asked if isinstance(asked, str) else f"{asked:.0%}"
    lines = [
        f"Prompt: {count(report.tokens.prompt, 'token')}: {tokens}",
        f"Chunks: {len(report.chunks)} cached, {len(report.misses)} not reused or not whole",
        f"Recomputed: {report.effective_ratio:.1%} of chunks' tokens, {asked} asked for",
        f"First token after {report.ttft_s:.3f} s ({steps})",
    ]
    if report.decode.tokens > 1:
        lines.append(
            f"Answer: {count(report.decode.tokens, 'token')} after {report.total_s:.3f} s, "
            f"{report.decode.ms_per_token:.0f} ms each"
        )
    notes = list(sentences(report.misses))
    reasons = [f"({miss.reason})" for miss in report.misses]
    notes += [
        f"Warning: {said}"
        for said in report.warnings
        if not any(reason in said for reason in reasons)
    ]
    room = MOST_LINES - len(lines)
    if len(notes) > room:
        notes[room - 1 :] = [f"… and {count(len(notes) - room + 1, 'more note')}, in to_dict()"]
    return "\n".join(lines + notes)


def sentences(misses: Iterable[Miss], of: str = "") -> Iterator[str]:
    """Yield one sentence for each reason: how many chunks, what happened, what to do.

    Parameters
    ----------
    of
        Of how many chunks, such as ``"Of 3 chunks, "``; it begins the sentence.
    """
    for miss, number in Counter(replace(miss, chunk="") for miss in misses).items():
        known = REASONS.get(miss.reason)
        meaning = "cannot be used" if known is None else known.meaning
        chunks = f"{number:,}" if of else count(number, "chunk")
        verb, subject = ("was", "it") if number == 1 else ("were", "each")
        about = f" ({miss.detail})" if miss.detail else ""
        said = f"{of}{chunks} {verb} not reused ({miss.reason}): {subject} {meaning}{about}."
        yield f"{said} {miss.mend}".rstrip()


def short(misses: Iterable[Miss]) -> str:
    """Return the misses by reason, such as ``2 list, 1 absent``."""
    counts = Counter(miss.reason for miss in misses)
    return ", ".join(f"{number} {reason}" for reason, number in counts.items())
