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

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.config import MEMORY
from ragkv.decode.listener import Listener
from ragkv.errors import ConfigError
from ragkv.model.loaded import LoadedModel, require_reusable
from ragkv.model.machine import device_name
from ragkv.prompt.render import Prompt
from ragkv.select import get_method
from ragkv_bench.data.examples import DataSet
from ragkv_bench.data.tasks import chunk_texts, prompt, template
from ragkv_bench.speed.costs import synchronise
from ragkv_bench.speed.machine import setup_of
from ragkv_bench.speed.peers.base import Opening
from ragkv_bench.speed.result import FULL, AnswerBenchmark, AnswerPeerRow, AnswerRow
from ragkv_bench.speed.traces import RequestTrace, make_traces, token_ids
from ragkv_bench.speed.ttft import UNBOUNDED, middle, require_different


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What is measured: every method at every ratio, prompt length and answer length.

    ``full`` is ragkv's decoding behind a full prefill: it has no ratio.

    Raises
    ------
    ConfigError
        A list is empty, or holds what cannot be measured.
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
        require_different(self, "tokens", "answer_tokens", "ratios", "methods")
        if min(*self.tokens, self.rounds) < 1 or min(self.answer_tokens) < 2:
            raise ConfigError("tokens and rounds must be 1 or more, answer_tokens 2 or more")
        for ratio in self.ratios:
            ReuseConfig(recompute_ratio=ratio)
        for method in self.methods:
            get_method(method)

    @property
    def settings(self) -> list[tuple[str, float]]:
        """Methods with their ratios, in the order of the options."""
        pairs = [(m, 1.0 if m == FULL else r) for m in self.methods for r in self.ratios]
        return list(dict.fromkeys(pairs))


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer's seconds to its first and its last token, and its tokens a step."""

    ttft_s: float
    total_s: float
    tokens_per_step: float = 1.0


Key = tuple[int, int]
"""A trace's index and an answer length."""


def bench_answers(
    loaded: LoadedModel,
    plan: AnswerPlan,
    *,
    data: DataSet | None = None,
    peers: Sequence[Opening] = (),
    show_progress: bool = False,
) -> AnswerBenchmark:
    """Measure whole answers; all have exactly the planned number of tokens.

    Parameters
    ----------
    data
        Its prompts are asked, ``plan.rounds`` of them, in place of made ones.

    Raises
    ------
    ConfigError
        A prompt cannot be made, or the model does not reuse its chunks.
    PeerError
        A peer does not start or gives no token.
    """
    store = StoreConfig(MEMORY, memory_bytes=UNBOUNDED, device_bytes=0, history_bytes=0)
    reuse = ReuseConfig(on_miss="skip", load="always", repair_ahead=plan.repair_ahead)
    with RagKV(require_reusable(loaded), store=store, reuse=reuse) as kv, _endless(kv):
        if data is None:
            traces = make_traces(kv, plan.tokens, plan.chunk_tokens, plan.rounds, plan.seed)
        else:
            traces = [_trace_of(kv, data, plan.rounds)]
        bench = _Bench(kv, plan, traces)
        bench.run(show_progress=show_progress)
    return AnswerBenchmark(
        model=loaded.name,
        device=device_name(loaded.device),
        rows=tuple(bench.rows()),
        peers=tuple(row for opening in peers for row in bench.compare(opening)),
        setup={**setup_of(loaded), "plan": asdict(plan)},
    )


class _Bench:
    """Times answers over the traces' prompts."""

    def __init__(self, kv: RagKV, plan: AnswerPlan, traces: Sequence[RequestTrace]) -> None:
        self._kv, self._plan, self._traces = kv, plan, traces
        self._full: dict[Key, list[Timing]] = {}
        self._own: dict[tuple[Key, tuple[str, float]], list[Timing]] = {}

    @property
    def _keys(self) -> list[Key]:
        return [
            (index, count)
            for index in range(len(self._traces))
            for count in self._plan.answer_tokens
        ]

    def run(self, *, show_progress: bool) -> None:
        """Time transformers and then each setting, prompt after prompt."""
        settings = self._plan.settings
        total = sum(len(self._traces[index].prompts) for index, _ in self._keys)
        with tqdm(total=total, disable=not show_progress, desc="answers") as bar:
            for index, trace in enumerate(self._traces):
                for method, _ in settings:
                    if get_method(method).uses_chunks:
                        bar.set_postfix_str(f"{trace.tokens} tokens: encoding chunks")
                        self._kv.precompute(trace.chunks, method=method, sink=trace.sink)
                for number, (asked, ids) in enumerate(zip(trace.prompts, trace.ids, strict=True)):
                    for count in self._plan.answer_tokens:
                        bar.set_postfix_str(f"{trace.tokens} + {count} tokens", refresh=False)
                        full = transformers_answer(self._kv, ids, count)
                        own = [self._answer(trace, asked, count, each) for each in settings]
                        bar.update()
                        if not number:  # the first prompt warms up
                            continue
                        key = (index, count)
                        self._full.setdefault(key, []).append(full)
                        for setting, timing in zip(settings, own, strict=True):
                            self._own.setdefault((key, setting), []).append(timing)

    def _answer(
        self, trace: RequestTrace, asked: Prompt, count: int, setting: tuple[str, float]
    ) -> Timing:
        method, ratio = setting
        synchronise(self._kv.loaded.device)
        started = time.perf_counter()
        report = self._kv.generate(
            asked,
            max_new_tokens=count,
            method=method,
            recompute_ratio=ratio,
            sink=trace.sink,
            prompt_lookup_num_tokens=None if self._plan.lookup else 0,
        ).report
        total = time.perf_counter() - started
        if report.misses or report.completion_tokens != count:
            raise ConfigError(
                f"this model's answers of {count} tokens to prompts of {report.prompt_tokens} "
                "cannot be compared: a chunk was not reused, or an answer ended before; give "
                "smaller --tokens"
            )
        return Timing(report.ttft_s, total, report.tokens_per_step)

    def rows(self) -> Iterator[AnswerRow]:
        """Yield a row for each setting, prompt length and answer length."""
        for (key, (method, ratio)), own in self._own.items():
            full = self._full[key]
            speedup, quartiles = middle(
                [a.total_s / b.total_s for a, b in zip(full, own, strict=True)]
            )
            ttft, ms, total = medians(own, key[1])
            full_ttft, full_ms, full_total = medians(full, key[1])
            yield AnswerRow(
                tokens=self._traces[key[0]].tokens,
                answer_tokens=key[1],
                method=method,
                ratio=ratio,
                ttft_s=ttft,
                ms_per_token=ms,
                total_s=total,
                tokens_per_step=statistics.median(each.tokens_per_step for each in own),
                full_ttft_s=full_ttft,
                full_ms_per_token=full_ms,
                full_total_s=full_total,
                speedup_total=speedup,
                quartiles=quartiles,
                rounds=len(own),
            )

    def compare(self, opening: Opening) -> Iterator[AnswerPeerRow]:
        """Give a peer the same prompts, and close it."""
        with opening() as peer:
            for index, count in self._keys:
                warm, *prompts = self._traces[index].ids
                peer.answer(warm, count)
                found = [Timing(*peer.answer(ids, count)) for ids in prompts]
                own = self._own[(index, count), self._plan.settings[0]]
                speedup, quartiles = middle(
                    [a.total_s / b.total_s for a, b in zip(found, own, strict=True)]
                )
                tokens = self._traces[index].tokens
                times = medians(found, count)
                yield AnswerPeerRow(peer.name, tokens, count, *times, speedup, quartiles)


def medians(timings: Sequence[Timing], count: int) -> tuple[float, float, float]:
    """Return the median first token, milliseconds a later token, and total of answers."""
    return (
        statistics.median(each.ttft_s for each in timings),
        statistics.median(1e3 * (each.total_s - each.ttft_s) / (count - 1) for each in timings),
        statistics.median(each.total_s for each in timings),
    )


def transformers_answer(kv: RagKV, ids: Sequence[int], count: int) -> Timing:
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
    return Timing(listener.first_at - started, total)


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
