"""Requests whose chunks recur: contextual versions against entries.

A retriever returns some chunks more often than others, and not always in one order. Each request
has some of an example's chunks and its question. Examples, and the chunks of each, are popular by
Zipf's law. Every request is answered without versions and with those that the requests before it
left, and both are compared with full attention.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from ragkv.errors import ConfigError
from ragkv.select import get_method, independent
from ragkv_bench.data.examples import Chunk, DataSet, Example
from ragkv_bench.data.prompts import chunk_texts, prompt, template
from ragkv_bench.quality.bootstrap import interval, mean
from ragkv_bench.quality.fidelity import fidelity, reference
from ragkv_bench.quality.records import Ratio
from ragkv_bench.quality.run import check_chunks, grid
from ragkv_bench.quality.subject import FULL, Setting
from ragkv_bench.results import Saved

if TYPE_CHECKING:
    from ragkv import RagKV


@dataclass(frozen=True, slots=True)
class RecurringRow:
    """One method and ratio over one half of the requests, with versions or without.

    Attributes
    ----------
    half
        1 or 2.
    share_recomputed
        Mean share of the cached tokens.
    kl, kl_ci95, agreement
        Means over requests, as in :class:`ragkv_bench.quality.summary.SummaryRow`.
    hits
        Chunks by the source of their rows.
    """

    method: str
    ratio: Ratio
    half: int
    versions: bool
    requests: int
    share_recomputed: float
    kl: float
    kl_ci95: tuple[float, float] | None
    agreement: float
    hits: dict[str, int]


@dataclass(frozen=True, slots=True)
class RecurringComparison(Saved):
    """What ``ragkv eval --recurring`` writes."""

    data: str
    requests: int
    rows: tuple[RecurringRow, ...]


@dataclass(frozen=True, slots=True)
class _Answered:
    setting: Setting
    half: int
    versions: bool
    share: float
    kl: float
    agreement: float
    hits: Counter[str]


def compare_recurring(
    kv: RagKV,
    data: DataSet,
    requests: int,
    *,
    methods: Sequence[str],
    ratios: Sequence[Ratio] = (0.2,),
    chunks_per_prompt: int = 6,
    alpha: float = 1.0,
    seed: int = 0,
    show_progress: bool = False,
) -> RecurringComparison:
    """Ask requests over recurring chunks, without versions and with them.

    Parameters
    ----------
    methods, ratios
        As in :class:`ragkv.ReuseConfig`; methods that use no versions are refused.
    chunks_per_prompt
        At most so many of an example's chunks.
    alpha
        Zipf's exponent, over examples and over the chunks of each.

    Raises
    ------
    ConfigError
        A method uses no versions, there are too few requests, or no chunk is long enough.
    """
    for method in methods:
        if not get_method(method).uses_versions:
            raise ConfigError(f"method {method} uses no contextual versions: --methods query")
    if requests < 2:
        raise ConfigError(f"--recurring compares two halves of the requests, not {requests}")
    settings = [setting for setting in grid(methods, ratios) if setting[0] != FULL]
    check_chunks(data)
    drawn = draw_requests(data, requests, chunks=chunks_per_prompt, alpha=alpha, seed=seed)
    seen: list[_Answered] = []
    for number, example in enumerate(tqdm(drawn, desc=data.name, disable=not show_progress)):
        seen += _answered(kv, example, settings, 1 + (2 * number >= requests))
    rows = [
        _row([each for each in seen if (each.half, each.versions) == (half, versions)], setting)
        for setting in settings
        for versions in (False, True)
        for half in (1, 2)
    ]
    return RecurringComparison(kv.model_name, data.name, requests, tuple(rows))


def draw_requests(
    data: DataSet, requests: int, *, chunks: int, alpha: float = 1.0, seed: int = 0
) -> list[Example]:
    """Draw examples with some of their chunks each; the more popular chunks tend to be first."""
    source = random.Random(seed)  # noqa: S311  seeded, not secret
    popular = source.sample(data.examples, len(data.examples))
    out = []
    for _ in range(requests):
        (example,) = source.choices(popular, _weights(len(popular), alpha))
        left = list(example.chunks)
        picked: list[Chunk] = []
        while left and len(picked) < chunks:
            (at,) = source.choices(range(len(left)), _weights(len(left), alpha))
            picked.append(left.pop(at))
        out.append(replace(example, chunks=tuple(picked)))
    return out


def _weights(count: int, alpha: float) -> list[float]:
    return [1 / place**alpha for place in range(1, count + 1)]


def _answered(
    kv: RagKV, example: Example, settings: Sequence[Setting], half: int
) -> Iterator[_Answered]:
    """Answer a request by all settings before it leaves versions."""
    chat = bool(kv.tokenizer.chat_template)
    asked, sink = prompt(example, chat=chat), kv.sink_from(template(example.task, chat=chat))
    kv.precompute(chunk_texts(example), sink=sink, contextual_versions=True)
    with kv.turn():
        full = reference(kv, kv.prefill(asked, method=FULL, sink=sink))
        for method, ratio in settings:
            given: dict[str, Any] = {
                "method": independent(method),
                "recompute_ratio": ratio,
                "sink": sink,
            }
            for versions in (False, True):
                out = kv.prefill(asked, contextual_versions=versions, **given)
                near = fidelity(kv, out, full)
                report = out.report
                yield _Answered(
                    (method, ratio),
                    half,
                    versions,
                    report.effective_ratio,
                    near.kl,
                    near.agreement,
                    Counter(report.hits),
                )
    kv.wait()


def _row(answered: Sequence[_Answered], setting: Setting) -> RecurringRow:
    mine = [each for each in answered if each.setting == setting]
    kl = np.array([each.kl for each in mine])
    return RecurringRow(
        method=get_method(setting[0]).name,
        ratio=setting[1],
        half=mine[0].half,
        versions=mine[0].versions,
        requests=len(mine),
        share_recomputed=sum(each.share for each in mine) / len(mine),
        kl=float(kl.mean()),
        kl_ci95=interval(mean, kl),
        agreement=sum(each.agreement for each in mine) / len(mine),
        hits=dict(sum((each.hits for each in mine), Counter[str]())),
    )
