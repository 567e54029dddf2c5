"""Time to first token from the question on, retrieval included, with and without speculation."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tqdm.auto import tqdm

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.config import MEMORY
from ragkv.errors import ConfigError
from ragkv.model.loaded import LoadedModel, require_reusable
from ragkv.model.machine import device_name
from ragkv.retrieve.following import follow
from ragkv.select import get_method
from ragkv_bench.results import Saved
from ragkv_bench.speed.load.documents import language_reference
from ragkv_bench.speed.load.workload import Dialogue, WorkloadPlan, draw_workload, messages_of
from ragkv_bench.speed.machine import setup_of
from ragkv_bench.speed.ttft import middle


@dataclass(frozen=True, slots=True)
class SpeculatePlan:
    """What is measured: every retriever over the same questions.

    Attributes
    ----------
    retrieval_s
        Retrievers: the seconds between their first list and their result.
    changed
        Share of the questions whose result is not their first list: its last chunk differs.
    requests, documents, chunks_per_prompt, chunk_tokens, seed
        As in ``ragkv bench serve``: documents recur by Zipf's law.

    Raises
    ------
    ConfigError
        A number is out of its range.
    """

    retrieval_s: tuple[float, ...] = (0.5, 0.02)
    changed: float = 0.25
    requests: int = 12
    documents: int = 12
    chunks_per_prompt: int = 6
    chunk_tokens: int = 320
    method: str = "query"
    ratio: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.retrieval_s or min(self.retrieval_s) < 0 or self.requests < 1:
            raise ConfigError("give one or more retrievers of 0 or more seconds, and requests")
        if not 0 <= self.changed <= 1 or self.chunks_per_prompt < 2:
            raise ConfigError("changed is a share from 0 to 1, and prompts have 2 or more chunks")
        ReuseConfig(recompute_ratio=self.ratio)
        get_method(self.method)


@dataclass(frozen=True, slots=True)
class SpeculateRow:
    """One retriever, over all questions.

    Attributes
    ----------
    plain_ttft_s, ttft_s
        Median seconds from the question to the first token, without and with speculation.
    speedup, quartiles
        Median and quartiles over questions of the first over the second.
    overlap_s
        Median seconds of computing that were over when the prompt was asked.
    started, used, cancelled
        Speculations.
    wasted_s
        Seconds of computing that nobody used, of all questions together.
    """

    retrieval_s: float
    requests: int
    plain_ttft_s: float
    ttft_s: float
    speedup: float
    quartiles: tuple[float, float]
    overlap_s: float
    started: int
    used: int
    cancelled: int
    wasted_s: float


@dataclass(frozen=True, slots=True)
class SpeculateBenchmark(Saved):
    """All rows, with what they were measured on."""

    device: str
    rows: tuple[SpeculateRow, ...]
    setup: dict[str, Any] = field(default_factory=dict)


def bench_speculate(
    loaded: LoadedModel, plan: SpeculatePlan, *, show_progress: bool = False
) -> SpeculateBenchmark:
    """Ask every question without speculation and with it, each first in turn.

    Nothing is continued from the question before: no rows of former prompts are kept. One
    question more warms up.

    Raises
    ------
    ConfigError
        There are fewer documents than the plan wants.
    UnsupportedModelError
        The model's caches cannot be reused.
    """
    require_reusable(loaded)
    questions = list(_questions(plan))
    chunks = dict.fromkeys(chunk for pair in questions for each in pair for chunk in each.chunks)
    reuse = ReuseConfig(recompute_ratio=plan.ratio, method=plan.method, load="always")
    rows = []
    for seconds in plan.retrieval_s:
        with RagKV(loaded, store=StoreConfig(MEMORY, history_bytes=0), reuse=reuse) as kv:
            kv.precompute(chunks)
            rows.append(_measured(kv, questions, seconds, show_progress=show_progress))
    setup = {**setup_of(loaded), "plan": asdict(plan)}
    return SpeculateBenchmark(loaded.name, device_name(loaded.device), tuple(rows), setup)


def _questions(plan: SpeculatePlan) -> Iterator[tuple[Dialogue, Dialogue]]:
    """Yield questions with the chunks of the first list, and with those of the result."""
    drawn = WorkloadPlan(
        plan.requests + 1, plan.documents, plan.chunks_per_prompt, turns=0, seed=plan.seed
    )
    documents = language_reference(plan.chunk_tokens, max(1, plan.chunks_per_prompt // 2))
    draw = random.Random(plan.seed)  # noqa: S311  seeded, not secret
    workload = draw_workload(drawn, documents)
    known = [chunk for document in workload.documents for chunk in document.chunks]
    for number, dialogue in enumerate(workload.dialogues):
        guess = dialogue.chunks
        if int(number * plan.changed) < int((number + 1) * plan.changed):
            others = [chunk for chunk in known if chunk not in guess]
            guess = (*guess[:-1], draw.choice(others))
        yield replace(dialogue, chunks=guess), dialogue


def _measured(
    kv: RagKV,
    questions: Sequence[tuple[Dialogue, Dialogue]],
    seconds: float,
    *,
    show_progress: bool,
) -> SpeculateRow:
    pairs: list[tuple[float, float]] = []
    overlaps: list[float] = []
    before = kv.status().speculations
    progress = tqdm(questions, disable=not show_progress, desc=f"retrieval of {seconds:g} s")
    for number, question in enumerate(progress):
        ways = {
            speculates: _ask(kv, question, seconds, speculates=speculates)
            for speculates in ((False, True) if number % 2 else (True, False))
        }
        if not number:  # the first question warms up
            before = kv.status().speculations
            continue
        pairs.append((ways[False][0], ways[True][0]))
        overlaps.append(ways[True][1])
    now = kv.status().speculations
    speedup, quartiles = middle([plain / ahead for plain, ahead in pairs])
    return SpeculateRow(
        retrieval_s=seconds,
        requests=len(pairs),
        plain_ttft_s=statistics.median(plain for plain, _ in pairs),
        ttft_s=statistics.median(ahead for _, ahead in pairs),
        speedup=speedup,
        quartiles=quartiles,
        overlap_s=statistics.median(overlaps),
        started=now.started - before.started,
        used=now.used - before.used,
        cancelled=now.cancelled - before.cancelled,
        wasted_s=now.wasted_s - before.wasted_s,
    )


def _ask(
    kv: RagKV, question: tuple[Dialogue, Dialogue], seconds: float, *, speculates: bool
) -> tuple[float, float]:
    """Return the seconds from the question to the first token, and those that were overlapped."""
    guess, final = question

    def retrieve() -> Iterator[tuple[Dialogue]]:
        yield (guess,)
        time.sleep(seconds)
        yield (final,)

    began = time.perf_counter()
    if speculates:
        (found,) = follow(kv, retrieve(), _prompt)
    else:
        *_, (found,) = retrieve()
    retrieved_s = time.perf_counter() - began
    report = kv.generate(_prompt([found]), max_new_tokens=1).report
    return retrieved_s + report.ttft_s, report.ahead_s


def _prompt(found: Sequence[Dialogue]) -> list[dict[str, str]]:
    return messages_of(found[0], ())
