"""Whole answers: ragkv, transformers' own ``generate`` and other engines, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from ragkv import RagKV, ReuseConfig
from ragkv.decode.listener import Listener
from ragkv.errors import ConfigError
from ragkv.model.loaded import LoadedModel, require_reusable
from ragkv.prompt.render import Prompt
from ragkv.report.account import ReuseReport
from ragkv.select import get_method
from ragkv_bench.data.examples import DataSet
from ragkv_bench.data.tasks import chunk_texts, prompt, template
from ragkv_bench.speed.machine import device_name, setup_of
from ragkv_bench.speed.peers.base import Startable, ask
from ragkv_bench.speed.timing import (
    IN_MEMORY,
    AnswerTime,
    check_plan,
    ratio_of,
    synchronise,
    timed,
)
from ragkv_bench.speed.traces import RequestTrace, make_traces, token_ids

FULL = "full"
"""The method of a full prefill."""
Setting = tuple[str, float]
"""A method and its ratio."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What is measured: every method at every ratio, prompt length and answer length.

    ``full`` is ragkv's decoding behind a full prefill: it has no ratio. Raises ConfigError for
    what cannot be measured.
    """

    tokens: tuple[int, ...] = (1024, 2048, 4096)
    answer_tokens: tuple[int, ...] = (32, 128, 256)
    chunk_tokens: int = 512
    ratios: tuple[float, ...] = (0.2,)
    methods: tuple[str, ...] = ("query", FULL)
    rounds: int = 3
    repair_ahead: bool = False
    lookup: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_plan(self, "tokens", "answer_tokens", "ratios", "methods")
        if min(self.answer_tokens) < 2:
            raise ConfigError("answer_tokens must be 2 or more")
        for method in self.methods:
            get_method(method)

    @property
    def settings(self) -> list[Setting]:
        """Methods with their ratios, in the order of the options."""
        pairs = [(m, 1.0 if m == FULL else r) for m in self.methods for r in self.ratios]
        return list(dict.fromkeys(pairs))


@dataclass(slots=True)
class Measured:
    """One prompt length with one answer length: a time a round."""

    trace: RequestTrace
    answer_tokens: int
    full: list[AnswerTime]
    own: dict[Setting, list[AnswerTime]]


def bench_answers(
    loaded: LoadedModel,
    plan: AnswerPlan,
    *,
    data: DataSet | None = None,
    peers: Sequence[Startable] = (),
    show_progress: bool = False,
) -> dict[str, Any]:
    """Measure whole answers; all have exactly the planned number of tokens.

    Returns ``rows``, one a length and setting, ``peers``, and the ``setup``. Where there is
    ``data``, its prompts are asked, ``plan.rounds`` of them, in place of made ones.

    Raises
    ------
    ConfigError
        A prompt cannot be made, or the model does not reuse its chunks.
    PeerError
        A peer does not start or gives no token.
    """
    reuse = ReuseConfig(on_miss="skip", repair_ahead=plan.repair_ahead)
    with RagKV(require_reusable(loaded), store=IN_MEMORY, reuse=reuse) as kv, _endless(kv):
        if data is None:
            traces = make_traces(kv, plan.tokens, plan.chunk_tokens, plan.rounds, plan.seed)
        else:
            traces = [_trace_of(kv, data, plan.rounds)]
        total = sum(len(trace.prompts) for trace in traces) * len(plan.answer_tokens)
        with tqdm(total=total, disable=not show_progress, desc="answers") as bar:
            measured = [one for trace in traces for one in _measure(kv, plan, trace, bar)]
    return {
        "model": loaded.name,
        "device": device_name(loaded.device),
        "rows": [_row(one, setting) for one in measured for setting in plan.settings],
        "peers": [row for each in peers for row in _compare(each, measured, plan.settings[0])],
        "setup": {**setup_of(loaded), "plan": asdict(plan)},
    }


def _measure(kv: RagKV, plan: AnswerPlan, trace: RequestTrace, bar: tqdm[Any]) -> list[Measured]:
    """Time transformers and then each setting, prompt after prompt, all answer lengths."""
    settings = plan.settings
    for method, _ in settings:
        if get_method(method).uses_chunks:
            bar.set_postfix_str(f"{trace.tokens} tokens: encoding chunks")
            kv.precompute(trace.chunks, method=method, sink=trace.sink)
    found = [
        Measured(trace, count, [], {each: [] for each in settings}) for count in plan.answer_tokens
    ]
    for number, (asked, ids) in enumerate(zip(trace.prompts, trace.ids, strict=True)):
        for one in found:
            count = one.answer_tokens
            bar.set_postfix_str(f"{trace.tokens} + {count} tokens", refresh=False)
            full = transformers_answer(kv, ids, count)
            own = {each: _answer(kv, plan, one, asked, each) for each in settings}
            bar.update()
            if number:  # the first prompt warms up
                one.full.append(full)
                for setting, answer in own.items():
                    one.own[setting].append(answer)
    return found


def _answer(
    kv: RagKV, plan: AnswerPlan, measured: Measured, asked: Prompt, setting: Setting
) -> AnswerTime:
    count = measured.answer_tokens

    def generate() -> ReuseReport:
        return kv.generate(
            asked,
            max_new_tokens=count,
            method=setting[0],
            recompute_ratio=setting[1],
            sink=measured.trace.sink,
            drafts=plan.lookup,
        ).report

    total, report = timed(kv.loaded.device, generate)
    if report.misses or report.completion_tokens != count:
        raise ConfigError(
            f"this model's answers of {count} tokens to prompts of {report.prompt_tokens} "
            "cannot be compared: a chunk was not reused, or an answer ended before; give "
            "smaller --tokens"
        )
    return AnswerTime(report.ttft_s, total, report.tokens_per_step)


def transformers_answer(kv: RagKV, ids: Sequence[int], count: int) -> AnswerTime:
    """Answer greedily by transformers' own ``generate``, as one does without ragkv."""
    given = torch.tensor([ids], device=kv.model.device)
    listener = Listener()
    generate: Any = kv.model.generate
    synchronise(kv.loaded.device)
    started = time.perf_counter()
    generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=count,
        do_sample=False,
        streamer=listener,
        top_p=None,
        top_k=None,
        temperature=None,
    )
    total = time.perf_counter() - started
    return AnswerTime(listener.first_at - started, total)


def _row(measured: Measured, setting: Setting) -> dict[str, Any]:
    """Return medians over rounds; ``full_…`` are of transformers' ``generate`` just before."""
    own, full, count = measured.own[setting], measured.full, measured.answer_tokens
    return {
        "tokens": measured.trace.tokens,
        "answer_tokens": count,
        "method": setting[0],
        "ratio": setting[1],
        **_medians(own, count),
        "tokens_per_step": statistics.median(each.tokens_per_step for each in own),
        **{f"full_{name}": value for name, value in _medians(full, count).items()},
        **_speedup(full, own),
        "rounds": len(own),
    }


def _compare(
    startable: Startable, measured: Sequence[Measured], against: Setting
) -> Iterator[dict[str, Any]]:
    """Give a peer the same prompts, and close it; ``speedup_total`` is ragkv's over its."""
    with startable as peer:
        for one in measured:
            found = ask(peer, one.trace.ids, one.answer_tokens)
            yield {
                "name": peer.name,
                "tokens": one.trace.tokens,
                "answer_tokens": one.answer_tokens,
                **_medians(found, one.answer_tokens),
                **_speedup(found, one.own[against]),
            }


def _speedup(first: Sequence[AnswerTime], second: Sequence[AnswerTime]) -> dict[str, Any]:
    """Return median and quartiles over rounds of the first totals over the second."""
    pairs = zip(first, second, strict=True)
    speedup, quartiles = ratio_of((one.total_s, other.total_s) for one, other in pairs)
    return {"speedup_total": speedup, "quartiles": quartiles}


def _medians(times: Sequence[AnswerTime], count: int) -> dict[str, float]:
    """Return the median first token, milliseconds a later token, and total of answers."""
    later = [1e3 * (each.total_s - each.ttft_s) / (count - 1) for each in times]
    return {
        "ttft_s": statistics.median(each.ttft_s for each in times),
        "ms_per_token": statistics.median(later),
        "total_s": statistics.median(each.total_s for each in times),
    }


@contextmanager
def _endless(kv: RagKV) -> Iterator[None]:
    """Let answers go on behind an end of text: all have the same number of tokens."""
    config: Any = kv.model.generation_config
    before = config.eos_token_id, config.pad_token_id
    config.eos_token_id, config.pad_token_id = None, None
    try:
        yield
    finally:
        config.eos_token_id, config.pad_token_id = before


def _trace_of(kv: RagKV, data: DataSet, rounds: int) -> RequestTrace:
    """Return the data's first prompts, one more than rounds, and all of their chunks."""
    examples = list(data.examples)[: rounds + 1]
    tasks = {example.task for example in examples}
    if len(examples) < 2 or len(tasks) > 1:
        raise ConfigError("--data needs two or more examples of one task")
    chat = bool(kv.tokenizer.chat_template)
    prompts = tuple(prompt(example, chat=chat) for example in examples)
    ids = tuple(token_ids(kv, asked) for asked in prompts)
    chunks = dict.fromkeys(text for example in examples for text in chunk_texts(example))
    sink = kv.sink_from(template(tasks.pop(), chat=chat))
    tokens = round(statistics.median(len(each) for each in ids[1:]))
    return RequestTrace(tokens, tuple(chunks), sink, prompts, ids)
