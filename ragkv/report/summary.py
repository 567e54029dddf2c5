"""A report's summary, and its misses in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ragkv.report.reasons import REASONS
from ragkv.report.words import count

if TYPE_CHECKING:
    from ragkv.report.account import Miss, ReuseReport

MOST_LINES = 10
"""Lines of a summary."""


def summary(report: ReuseReport) -> str:
    """Return the origin of the tokens, the time by step, and the misses, in a few lines."""
    sources = {
        "sink": report.tokens.sink,
        "exact from history": report.tokens.history_exact,
        "repaired from history": report.tokens.history_repaired,
        "reused": report.tokens.reused,
        "from versions": report.tokens.version,
        "recomputed": report.tokens.recomputed,
        "not cached": report.tokens.fresh,
    }
    tokens = ", ".join(f"{number:,} {name}" for name, number in sources.items() if number)
    steps = ", ".join(f"{name} {seconds:.3f}" for name, seconds in report.steps.items())
    ratio = report.recompute_ratio
    requested = ratio if isinstance(ratio, str) else f"{ratio:.0%}"
    lines = [
        f"Prompt: {count(report.tokens.prompt, 'token')}: {tokens}",
        f"Chunks: {len(report.chunks)} cached, {len(report.misses)} not reused or only in part",
        f"Recomputed: {report.effective_ratio:.1%} of chunks' tokens, {requested} requested",
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
    """Yield one sentence for each reason: the number of chunks, the reason, the remedy.

    Parameters
    ----------
    of
        The beginning of the sentence, such as ``"Of 3 chunks, "``.
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
