"""What an engine gains from history: requests over recurring chunks, one after another."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from tqdm.auto import tqdm

from ragkv import RagKV, StoreConfig
from ragkv.config import MEMORY
from ragkv.errors import ConfigError
from ragkv.select import Method, get_method
from ragkv_bench import results
from ragkv_bench.data.examples import DataSet, Example
from ragkv_bench.data.tasks import chunk_texts, prompt, template
from ragkv_bench.quality.fidelity import Fidelity, Reference, fidelity, reference
from ragkv_bench.quality.intervals import interval
from ragkv_bench.quality.records import Ratio
from ragkv_bench.quality.run import check_chunks
from ragkv_bench.results import of

if TYPE_CHECKING:
    from ragkv.report.account import ReuseReport

FULL = "full"
SETTINGS = ("no history", "history", "history, idle")
"""The three engines; the last one has time to finish its work between two requests."""

_STORE = StoreConfig(MEMORY, memory_bytes=1 << 50)
_CAPTION = (
    "again: over chunks in an order that was asked about before. computed: tokens a prompt. share:"
    " of the known tokens, recomputed. KL, agree: to full attention. TTFT: median seconds."
)


@dataclass(frozen=True, slots=True)
class HistoryPlan:
    """Which requests are made.

    A topic is an example of the data: its chunks in their order, as they were retrieved for its
    question. Topics are drawn with the probability ``1 / rank ** alpha``, in an order of ranks that
    ``seed`` draws. A share ``mixed`` of the requests has the chunks of two topics, half of each, in
    random order; the others have a topic's chunks as they are. Questions are drawn from all of the
    data without replacement, and again when all were asked: a topic is asked about in other words.
    """

    requests: int = 200
    alpha: float = 1.0
    mixed: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 2:
            raise ConfigError(f"history needs 2 requests or more, not {self.requests}")


def draw_requests(data: DataSet, plan: HistoryPlan) -> list[Example]:
    """Return the requests in their order, as examples of one task.

    Raises ConfigError where the data has more than one task.
    """
    if len({example.task for example in data.examples}) > 1:
        raise ConfigError(f"{data.name} has examples of more than one task: history needs one")
    draw = random.Random(plan.seed)  # noqa: S311  seeded, not secret
    topics = draw.sample(data.examples, len(data.examples))
    weights = [rank**-plan.alpha for rank in range(1, len(topics) + 1)]
    questions = _shuffled(data.examples, draw)
    made: list[Example] = []
    while len(made) < plan.requests:
        first, second = draw.choices(topics, weights, k=2)
        chunks = list(first.chunks)
        if draw.random() < plan.mixed:
            half = len(chunks) // 2
            both = draw.sample(chunks, len(chunks) - half)
            both += draw.sample(second.chunks, min(half, len(second.chunks)))
            chunks = list({chunk.text: chunk for chunk in both}.values())
            draw.shuffle(chunks)
        made.append(replace(next(questions), chunks=tuple(chunks)))
    return made


def _shuffled(examples: Sequence[Example], draw: random.Random) -> Iterator[Example]:
    while True:
        yield from draw.sample(examples, len(examples))


def evaluate_history(
    kv: RagKV,
    data: DataSet,
    plan: HistoryPlan,
    *,
    method: str | Method = "query",
    ratio: Ratio = 0.2,
    show_progress: bool = False,
) -> results.Found:
    """Ask an engine with history, one with idle time besides, and one without, the same requests.

    Each is a new engine over the model of ``kv``, with its other reuse settings, whose chunks are
    all in memory before the first request. Every request is compared with full attention as in
    :func:`ragkv_bench.quality.run.evaluate`; where there is history a token is drawn then, too,
    since a prefill alone leaves nothing behind. Returns model, data and plan; ``rows``, one a
    setting and part of the requests; ``requests``, one a setting and request.

    Raises ConfigError: the data has several tasks, or no chunk that is long enough to be reused;
    PromptTooLongError: a prompt exceeds the model's positions.
    """
    check_chunks(data)
    requests, chat = draw_requests(data, plan), bool(kv.tokenizer.chat_template)
    sink = kv.sink_from(template(requests[0].task, chat=chat))
    reuse = kv.reuse.override(method=method, recompute_ratio=ratio, sink=sink)
    texts = dict.fromkeys(text for each in requests for text in chunk_texts(each))
    prompts = [prompt(each, chat=chat) for each in requests]
    visits: list[results.Found] = []
    against: list[Reference] = []
    total = len(requests) * (1 + len(SETTINGS))
    with tqdm(total=total, disable=not show_progress, desc=FULL) as bar:
        for number, request in enumerate(prompts):
            full = kv.prefill(request, method=FULL, history=False)
            visits.append(_visit(FULL, number, full.report, Fidelity(kl=0.0, agreement=1.0)))
            against.append(reference(kv, full))
            bar.update()
        for setting in SETTINGS:
            bar.set_description(setting)
            keeps = reuse.override(history=setting != "no history")
            with RagKV(kv.loaded, store=_STORE, reuse=keeps) as engine:
                engine.precompute(texts)
                for number, request in enumerate(prompts):
                    prefilled = engine.prefill(request)
                    with engine.turn():  # comparing is no idle time
                        near = fidelity(engine, prefilled, against[number])
                    visits.append(_visit(setting, number, prefilled.report, near))
                    if keeps.history:
                        engine.generate(request, max_new_tokens=1)
                    if setting == "history, idle":
                        engine.wait()
                    bar.update()
    return {
        "model": kv.info.name,
        "data": data.name,
        "plan": asdict(plan),
        "method": get_method(method).name,
        "recompute_ratio": ratio,
        "rows": [
            _row(setting, part, [visits[of * len(requests) + at] for at in numbers], plan.seed)
            for of, setting in enumerate((FULL, *SETTINGS))
            for part, numbers in _parts(requests).items()
            if numbers
        ],
        "requests": visits,
    }


def _visit(setting: str, number: int, report: ReuseReport, near: Fidelity) -> results.Found:
    """Return one request's figures; the share is of the tokens whose KV was known."""
    known = report.tokens.prompt - report.tokens.sink - report.tokens.fresh
    return {
        "setting": setting,
        "number": number,
        **asdict(near),
        "prompt_tokens": report.tokens.prompt,
        "computed_tokens": report.tokens.recomputed + report.tokens.fresh,
        "share_recomputed": report.tokens.recomputed / known if known else 1.0,
        "ttft_s": report.ttft_s,
    }


def _parts(requests: Sequence[Example]) -> dict[str, Sequence[int]]:
    """Return the numbers of the requests that each row is about."""
    count, orders = len(requests), [each.chunks for each in requests]
    again = [at for at, order in enumerate(orders) if order in orders[:at]]
    return {"first": range(count // 2), "second": range(count // 2, count), "again": again}


def _row(setting: str, part: str, found: Sequence[results.Found], seed: int) -> results.Found:
    """Return means over some requests, and the median time."""
    means = ("kl", "agreement", "prompt_tokens", "computed_tokens", "share_recomputed")
    return {
        "setting": setting,
        "part": part,
        "requests": len(found),
        **{name: statistics.fmean(visit[name] for visit in found) for name in means},
        "kl_ci95": interval(np.mean, np.array([visit["kl"] for visit in found]), seed=seed),
        "ttft_s": statistics.median(visit["ttft_s"] for visit in found),
    }


def table(found: results.Found) -> Table:
    """Return a rich table: one row a setting and part."""
    title = (
        f"{results.short_name(found['model'])} on {found['data']},"
        f" {found['plan']['requests']} requests, {found['method']} {found['recompute_ratio']}"
    )
    columns = {
        "setting": of("setting"),
        "part": of("part"),
        "tokens": of("prompt_tokens", ",.0f"),
        "computed": of("computed_tokens", ",.0f"),
        "share": of("share_recomputed", ".1%"),
        "KL": of("kl", ".4f"),
        "agree": of("agreement", ".1%"),
        "TTFT": of("ttft_s", ".3g"),
    }
    return results.table(title, _CAPTION, found["rows"], columns, words=2)
