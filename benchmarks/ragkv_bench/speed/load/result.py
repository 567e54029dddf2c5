"""What a load found: percentiles over requests, rates over the run's time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragkv_bench.speed.load.client import ServedAnswer
from ragkv_bench.speed.table import PERCENTS


def rows_of(answers: Sequence[ServedAnswer], wall_s: float) -> list[dict[str, Any]]:
    """Return the row of all requests and, where there are several turns, one a turn."""
    turns = sorted({answer.turn for answer in answers})
    groups = {str(turn + 1): [one for one in answers if one.turn == turn] for turn in turns}
    rows = {"all": answers} | (groups if len(turns) > 1 else {})
    return [_row(turns, group, wall_s) for turns, group in rows.items()]


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return a percentile between its neighbours in proportion; None of nothing."""
    return float(np.percentile(values, percent)) if values else None


def _row(turns: str, answers: Sequence[ServedAnswer], wall_s: float) -> dict[str, Any]:
    """Return percentiles over whole answers, and shares and rates over all of their tokens.

    Inter-token times are a request's mean, the longest gap its worst. ``counted`` are answers
    whose tokens are counted pieces. ``cached_share`` is of the prompt tokens as ``usage`` has them.
    """
    whole = [answer for answer in answers if answer.error is None]
    kinds = Counter(answer.error for answer in answers if answer.error is not None)
    measured: dict[str, list[float | None]] = {
        "ttft": [answer.ttft_s for answer in whole],
        "inter_token": [answer.inter_token_s for answer in whole],
        "longest_gap": [
            answer.longest_gap_s if answer.completion_tokens > 1 else None for answer in whole
        ],
        "answer": [answer.answer_s for answer in whole],
    }
    prompt = sum(answer.prompt_tokens for answer in whole)
    completion = sum(answer.completion_tokens for answer in whole)
    sources: Counter[str] = Counter()
    for answer in whole:
        sources.update(answer.sources)
    return {
        "turns": turns,
        "requests": len(answers),
        "errors": len(answers) - len(whole),
        "errors_by_kind": dict(sorted(kinds.items())),
        **{
            f"{name}_p{percent}_s": percentile([one for one in values if one is not None], percent)
            for name, values in measured.items()
            for percent in PERCENTS
        },
        "tokens_per_s": completion / wall_s,
        "requests_per_s": len(whole) / wall_s,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "counted": sum(answer.counted for answer in whole),
        "cached_share": sum(answer.cached_tokens for answer in whole) / max(prompt, 1),
        "sources": {name: count / max(sources.total(), 1) for name, count in sources.items()},
    }
