"""Whole answers: ragkv, transformers' own ``generate`` and other engines, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, Literal

import torch
from rich.table import Table
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ragkv import RagKV, ReuseConfig
from ragkv.decode.listener import Listener
from ragkv.errors import ConfigError
from ragkv.model.loaded import LoadedModel, require_reusable
from ragkv.prompt.render import Prompt
from ragkv.report.account import ReuseReport
from ragkv.select import get_method
from ragkv_bench.results import Found, grey, of, table
from ragkv_bench.speed.machine import device_name, setup_of, title_of
from ragkv_bench.speed.peers.base import Startable, ask, builds_of
from ragkv_bench.speed.timing import (
    IN_MEMORY,
    AnswerTime,
    check_plan,
    medians,
    ratio_of,
    synchronise,
    timed,
)
from ragkv_bench.speed.traces import RequestTrace, make_traces

FULL = "full"
"""The method of a full prefill."""
BY_LLAMA_CPP = "+llama.cpp"
"""Ends a method's name if llama.cpp decodes its answers."""
Decoder = Literal["llama.cpp"] | None
Setting = tuple[str, float]
"""A method and its ratio."""
_CAPTION = (
    "Medians over {rounds} rounds, transformers' generate and ragkv in turn; grey: quartiles. "
    "Answers go on past an end of text."
)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What is measured: every method at every ratio, prompt length and answer length.

    ``full`` is ragkv's decoding behind a full prefill: it has no ratio. ``+llama.cpp`` behind a
    method's name decodes its answers by llama.cpp. Raises ConfigError for what cannot be measured.
    """

    tokens: tuple[int, ...] = (1024, 2048, 4096)
    answer_tokens: tuple[int, ...] = (32, 128, 256)
    chunk_tokens: int = 512
    ratios: tuple[float, ...] = (0.2,)
    methods: tuple[str, ...] = ("query", FULL)
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_plan(self, "tokens", "answer_tokens", "ratios", "methods")
        if min(self.answer_tokens) < 2:
            raise ConfigError("answer_tokens must be 2 or more")
        for method in self.methods:
            get_method(_method_of(method))

    @property
    def settings(self) -> list[Setting]:
        """Methods with their ratios, in the order of the options."""
        pairs = [
            (m, 1.0 if _method_of(m) == FULL else r) for m in self.methods for r in self.ratios
        ]
        return list(dict.fromkeys(pairs))


Times = dict[Setting, list[AnswerTime]]
Measured = tuple[RequestTrace, int, Times]
"""A prompt length with an answer length, and a time a round."""


def bench_answers(
    loaded: LoadedModel,
    plan: AnswerPlan,
    *,
    peers: Sequence[Startable] = (),
    show_progress: bool = False,
) -> Found:
    """Measure whole answers; all have exactly the planned number of tokens.

    Returns ``rows``, one a length and setting, ``peers``, and the ``setup``.

    Raises ConfigError: a prompt cannot be made, or the model does not reuse its chunks; PeerError:
    a peer does not start or gives no token.
    """
    reuse = ReuseConfig(on_miss="skip")
    with ExitStack() as stack:
        decoders = {_decoder_of(method): None for method in ("query", *plan.methods)}
        engines = {
            decoder: stack.enter_context(
                RagKV(require_reusable(loaded), store=IN_MEMORY, reuse=reuse, decoder=decoder)
            )
            for decoder in decoders
        }
        kv = engines[None]
        traces = make_traces(kv, plan.tokens, plan.chunk_tokens, plan.rounds, plan.seed)
        total = sum(len(trace.prompts) for trace in traces) * len(plan.answer_tokens)
        rows, measured = list[Found](), list[Measured]()
        with tqdm(total=total, disable=not show_progress, desc="answers") as bar:
            for trace, count in product(traces, plan.answer_tokens):
                full, own = _measure(engines, plan, trace, count, bar)
                rows += [_row(trace, count, setting, full, own[setting]) for setting in own]
                measured.append((trace, count, own))
    return {
        "model": loaded.name,
        "device": device_name(loaded.device),
        "rows": rows,
        "peers": [row for each in peers for row in _compare(each, measured, plan.settings[0])],
        "setup": setup_of(loaded, plan),
    }


def _method_of(name: str) -> str:
    return name.removesuffix(BY_LLAMA_CPP)


def _decoder_of(method: str) -> Decoder:
    return "llama.cpp" if method.endswith(BY_LLAMA_CPP) else None


def _measure(
    engines: dict[Decoder, RagKV],
    plan: AnswerPlan,
    trace: RequestTrace,
    count: int,
    bar: tqdm[Any],
) -> tuple[list[AnswerTime], Times]:
    """Time transformers and then each setting, prompt after prompt; the first one warms up."""
    full, own = list[AnswerTime](), {setting: list[AnswerTime]() for setting in plan.settings}
    bar.set_postfix_str(f"{trace.tokens} + {count} tokens", refresh=False)
    for name, _ in own:
        method = _method_of(name)
        if get_method(method).uses_chunks:
            engines[_decoder_of(name)].precompute(trace.chunks, method=method, sink=trace.sink)
    for prompt, ids in zip(trace.prompts, trace.ids, strict=True):
        full.append(transformers_answer(engines[None].loaded.model, [ids], count))
        for setting, times in own.items():
            kv = engines[_decoder_of(setting[0])]
            times.append(_answer(kv, trace, prompt, setting, count))
        bar.update()
    return full[1:], {setting: times[1:] for setting, times in own.items()}


def _answer(
    kv: RagKV, trace: RequestTrace, prompt: Prompt, setting: Setting, count: int
) -> AnswerTime:
    def generate() -> ReuseReport:
        return kv.generate(
            prompt,
            max_new_tokens=count,
            method=_method_of(setting[0]),
            recompute_ratio=setting[1],
            sink=trace.sink,
            ignore_eos=True,
        ).report

    total, report = timed(kv.loaded.device, generate)
    if report.misses or report.decode.tokens != count:
        raise ConfigError(
            f"this model's answers of {count} tokens to prompts of {report.tokens.prompt} "
            "cannot be compared: a chunk was not reused, or an answer ended before; give "
            "smaller --tokens"
        )
    return AnswerTime(report.ttft_s, total, report.decode.tokens_per_step)


def transformers_answer(
    model: PreTrainedModel, ids: Sequence[Sequence[int]], count: int, **more: object
) -> AnswerTime:
    """Answer prompts greedily by transformers' own ``generate``, as one does without ragkv."""
    given = torch.tensor(ids, device=model.device)
    listener = Listener()
    generate: Any = model.generate
    synchronise(model.device)
    started = time.perf_counter()
    generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
        do_sample=False,
        streamer=listener,
        top_p=None,
        top_k=None,
        temperature=None,
        **more,
    )
    total = time.perf_counter() - started
    return AnswerTime(listener.first_at - started, total)


def _row(
    trace: RequestTrace,
    count: int,
    setting: Setting,
    full: Sequence[AnswerTime],
    own: Sequence[AnswerTime],
) -> Found:
    """Return medians over rounds; ``full_…`` are of transformers' ``generate`` just before."""
    return {
        "tokens": trace.tokens,
        "answer_tokens": count,
        "method": setting[0],
        "ratio": setting[1],
        **medians(own, count),
        "tokens_per_step": statistics.median(each.tokens_per_step for each in own),
        **{f"full_{name}": value for name, value in medians(full, count).items()},
        **_speedup(full, own),
        "rounds": len(own),
    }


def _compare(
    startable: Startable, measured: Sequence[Measured], against: Setting
) -> Iterator[Found]:
    """Give a peer the same prompts, and close it; ``speedup_total`` is ragkv's over its."""
    with startable as peer:
        for trace, count, own in measured:
            found = ask(peer, trace.ids, count)
            lengths = {"tokens": trace.tokens, "answer_tokens": count}
            times = medians(found, count) | _speedup(found, own[against])
            yield {"name": peer.name, "build": peer.build, **lengths, **times}


def _speedup(first: Sequence[AnswerTime], second: Sequence[AnswerTime]) -> Found:
    """Return median and quartiles over rounds of the first totals over the second."""
    totals = ([each.total_s for each in times] for times in (first, second))
    speedup, quartiles = ratio_of(*totals)
    return {"speedup_total": speedup, "quartiles": quartiles}


def tables(found: Found) -> list[Table]:
    """Return the one table: lengths together, all against transformers."""
    shown: list[Found] = []
    for length, group in groupby(found["rows"], _length):
        rows = list(group)
        first = rows[0] | {name.removeprefix("full_"): rows[0][name] for name in rows[0]}
        shown.append(first | {"name": "transformers", "tokens_per_step": 1.0, "speed-up": "1.0x"})
        for row in rows:
            name = FULL if row["method"] == FULL else f"{row['method']} {row['ratio']:g}"
            speedup = f"{row['speedup_total']:.1f}x\n{grey(row['quartiles'], '.1f')}"
            shown.append(row | {"name": name, "speed-up": speedup})
        for row in (peer for peer in found["peers"] if _length(peer) == length):
            speedup = f"{first['total_s'] / row['total_s']:.1f}x"
            shown.append(row | {"tokens_per_step": None, "speed-up": speedup})
    columns = {
        "method": of("name"),
        "prompt": of("tokens", ","),
        "answer": of("answer_tokens", ","),
        "first s": of("ttft_s", ".3g"),
        "ms/tok": of("ms_per_token", ".1f"),
        "tok/step": of("tokens_per_step", ".2f"),
        "total s": of("total_s", ".3g"),
        "speed-up": of("speed-up"),
    }
    caption = _CAPTION.format(rounds=max(row["rounds"] for row in found["rows"]))
    caption += builds_of(found["peers"])
    return [table(title_of(found), caption, shown, columns)]


def _length(row: Found) -> tuple[int, int]:
    return row["tokens"], row["answer_tokens"]
