"""Time to first token: full prefill and ragkv in turn, prompt after prompt, in one process."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from rich.table import Table
from tqdm.auto import tqdm

from ragkv import RagKV, ReuseConfig
from ragkv.errors import ConfigError
from ragkv.model.loaded import LoadedModel, ReusableModel, require_reusable
from ragkv.prompt.render import Prompt
from ragkv.report.account import ReuseReport
from ragkv.select import get_method
from ragkv.splice.layout import Origin
from ragkv_bench.results import Found, cell, grey, of, table
from ragkv_bench.speed.bound import Costs, copy_rate, read_rate, timed_prefill
from ragkv_bench.speed.machine import device_name, setup_of, title_of
from ragkv_bench.speed.memory import peak_growth
from ragkv_bench.speed.peers.base import Startable, ask, builds_of
from ragkv_bench.speed.timing import IN_MEMORY, check_plan, ratio_of, timed
from ragkv_bench.speed.traces import RequestTrace, make_traces

Tier = Literal["memory", "disk"]
"""Where the chunks' caches are: in memory, or in files that the system has cached."""
_CAPTION = (
    "Medians over {rounds} rounds, full prefill and ragkv in turn; grey: quartiles. "
    "bound: the least that computing these tokens costs at the rates of one pass by transformers' "
    "code. eff.: of the time taken, the bound's share. MB: peak memory above that before the "
    "request."
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of using ragkv."""

    method: str
    ratio: float
    tier: Tier

    def __str__(self) -> str:
        return f"{self.method} {self.ratio:g} {self.tier}"


@dataclass(frozen=True, slots=True)
class TtftPlan:
    """What is measured: every method at every ratio from every tier at every length.

    Raises ConfigError for what cannot be measured.
    """

    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192)
    chunk_tokens: int = 512
    ratios: tuple[float, ...] = (0.0, 0.1, 0.2)
    methods: tuple[str, ...] = ("query",)
    tiers: tuple[Tier, ...] = ("memory",)
    rounds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_plan(self, "tokens", "ratios", "methods", "tiers")
        unknown = set(self.tiers) - set(get_args(Tier))
        if unknown:
            raise ConfigError(f"tiers are {' and '.join(get_args(Tier))}, not {unknown}")
        for method in self.methods:
            if not get_method(method).uses_chunks:
                raise ConfigError(
                    f"method {method!r} reuses no chunks: name methods to compare with full prefill"
                )

    @property
    def settings(self) -> list[Setting]:
        """All combinations, in the order of the options."""
        return [Setting(*each) for each in product(self.methods, self.ratios, self.tiers)]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One round of one setting: ragkv's seconds and those of the full prefill before it."""

    full_s: float
    ragkv_s: float
    report: ReuseReport


Samples = dict[Setting, list[Sample]]


def bench_ttft(
    loaded: LoadedModel,
    plan: TtftPlan,
    *,
    auxiliary_model: str | None = None,
    peers: Sequence[Startable] = (),
    show_progress: bool = False,
) -> Found:
    """Measure times to first token against full prefill, the bound and peers.

    Returns ``rows``, one a length and setting; ``peers``; ``setup``: plan, versions, threads, and
    the loading rates in bytes a second.

    Raises ConfigError: a prompt cannot be made, or the model does not reuse its chunks;
    PromptTooLongError: the model has fewer positions than a prompt has; PeerError: a peer does not
    start or gives no token.
    """
    reusable = require_reusable(loaded)
    reuse = ReuseConfig(auxiliary_model=auxiliary_model, on_miss="skip")
    total = len(plan.tokens) * plan.rounds * len(plan.settings)
    rates: dict[Tier, float] = {}
    engines: dict[Tier, RagKV] = {}
    rows: list[Found] = []
    measured: list[tuple[RequestTrace, Samples]] = []
    with ExitStack() as stack, tqdm(total=total, disable=not show_progress, desc="ttft") as bar:
        bar.set_postfix_str("cutting the text into prompts")
        for tier in plan.tiers:
            store, rates[tier] = IN_MEMORY, copy_rate(loaded.device)
            if tier == "disk":
                temporary = tempfile.TemporaryDirectory(prefix="ragkv-bench-")
                folder = Path(stack.enter_context(temporary))
                rates[tier] = min(rates[tier], read_rate(folder))
                store = replace(store, path=folder / "store", memory_bytes=0)
            engines[tier] = stack.enter_context(RagKV(loaded, store=store, reuse=reuse))
            if (chunks := engines[tier]._reuse) is not None:  # noqa: SLF001
                chunks.corpus.loads_always = True  # slow loads are measured, too
        first = engines[plan.tiers[0]]
        for trace in make_traces(first, plan.tokens, plan.chunk_tokens, plan.rounds, plan.seed):
            samples, costs = _measure(reusable, engines, plan, trace, bar)
            measured.append((trace, samples))
            for setting, own in samples.items():
                request = partial(_reused, engines[setting.tier], setting, trace, trace.prompts[0])
                reusable.workspace.release()  # or its memory were not counted
                peak = peak_growth(request, loaded.device)
                row = _row(reusable, own, costs, rates[setting.tier])
                rows.append({"tokens": trace.tokens, **asdict(setting), **row, "peak_bytes": peak})
    against = Setting(plan.methods[0], max(plan.ratios), plan.tiers[0])
    return {
        "model": loaded.name,
        "device": device_name(loaded.device),
        "rows": rows,
        "peers": [row for peer in peers for row in _compare(peer, measured, against)],
        "setup": {**setup_of(loaded, plan), "bytes_per_s": rates},
    }


def _measure(
    loaded: ReusableModel,
    engines: Mapping[Tier, RagKV],
    plan: TtftPlan,
    trace: RequestTrace,
    bar: tqdm[Any],
) -> tuple[Samples, Costs]:
    """Measure all settings at one prompt length, and what a full prefill costs."""
    settings = plan.settings
    for kv in engines.values():
        for method in plan.methods:
            bar.set_postfix_str(f"{trace.tokens} tokens: encoding chunks for {method}")
            kv.precompute(trace.chunks, method=method, sink=trace.sink)
    warm, *prompts = trace.prompts
    for setting in settings:
        bar.set_postfix_str(f"{trace.tokens} tokens: warming up {setting}")
        _pair(engines[setting.tier], setting, trace, warm)
    samples: Samples = {setting: [] for setting in settings}
    prefills = []
    for number, prompt in enumerate(prompts):
        first = number % len(settings)  # no setting always comes at the same place
        for setting in settings[first:] + settings[:first]:
            bar.set_postfix_str(f"{trace.tokens} tokens, {setting}", refresh=False)
            samples[setting].append(_pair(engines[setting.tier], setting, trace, prompt))
            bar.update()
        prefills.append(timed_prefill(loaded, trace.ids[number + 1]))
    prefills.sort(key=lambda one: one.prefill_s)
    return samples, prefills[len(prefills) // 2]


def _pair(kv: RagKV, setting: Setting, trace: RequestTrace, prompt: Prompt) -> Sample:
    """Time a full prefill, then ragkv on the same prompt."""
    full_s, _ = _first_token(kv, prompt, method="full", recompute_ratio=1.0)
    ragkv_s, report = _reused(kv, setting, trace, prompt)
    if report.misses:
        raise ConfigError(
            f"a chunk was not reused ({report.misses[0].reason}): this model's prompts of "
            f"{report.tokens.prompt} tokens are prefilled in full, so there is nothing to "
            "compare; give smaller --tokens"
        )
    return Sample(full_s, ragkv_s, report)


def _reused(
    kv: RagKV, setting: Setting, trace: RequestTrace, prompt: Prompt
) -> tuple[float, ReuseReport]:
    overrides = {"method": setting.method, "recompute_ratio": setting.ratio, "sink": trace.sink}
    return _first_token(kv, prompt, **overrides)


def _first_token(kv: RagKV, prompt: Prompt, **overrides: Any) -> tuple[float, ReuseReport]:
    """Return the seconds of an answer of one token, and the engine's report."""

    def answer() -> ReuseReport:
        return kv.generate(prompt, max_new_tokens=1, history=False, **overrides).report

    return timed(kv.loaded.device, answer)


def _row(loaded: ReusableModel, samples: Sequence[Sample], costs: Costs, rate: float) -> Found:
    """Return medians over rounds; what belongs to one request is of the round with the median time.

    ``steps`` sum to ``ragkv_s``. ``speedup`` and its quartiles are over rounds, a full prefill's
    time over that of ragkv right after it.
    """
    median = sorted(samples, key=lambda sample: sample.ragkv_s)[(len(samples) - 1) // 2]
    report, rest = median.report, median.ragkv_s - median.report.ttft_s
    origin = np.frombuffer(report.positions, dtype=np.uint8)
    rows = np.flatnonzero(origin >= Origin.RECOMPUTED)
    token_bytes = loaded.architecture.values_per_token * loaded.dtype.itemsize
    bound = costs.bound_s(rows, report.tokens.reused * token_bytes / rate)
    full, own = zip(*((sample.full_s, sample.ragkv_s) for sample in samples), strict=True)
    speedup, quartiles = ratio_of(full, own)
    return {
        "full_s": statistics.median(full),
        "ragkv_s": median.ragkv_s,
        "speedup": speedup,
        "bound_s": bound,
        "efficiency": bound / median.ragkv_s,
        "steps": {**report.steps, "first_token": report.steps["first_token"] + rest},
        "quartiles": quartiles,
        "prompt_tokens": costs.tokens,
        "computed_tokens": len(rows),
        "rounds": len(samples),
    }


def _compare(
    startable: Startable, measured: Sequence[tuple[RequestTrace, Samples]], against: Setting
) -> Iterator[Found]:
    """Give a peer the prompts that ragkv had, in the same order, and close it.

    ``speedup`` is its time over ragkv's with the setting ``against``.
    """
    with startable as peer:
        for trace, samples in measured:
            found = [each.ttft_s for each in ask(peer, trace.ids, 1)]
            speedup, quartiles = ratio_of(found, (own.ragkv_s for own in samples[against]))
            yield {
                "name": peer.name,
                "build": peer.build,
                "tokens": trace.tokens,
                "ttft_s": statistics.median(found),
                "speedup": speedup,
                "quartiles": quartiles,
                "against": str(against),
            }


def tables(found: Found) -> list[Table]:
    """Return the speed-ups, the steps, and the peers if there are any."""
    rows, peers = found["rows"], found["peers"]
    caption = _CAPTION.format(rounds=max(row["rounds"] for row in rows))
    names = dict.fromkeys(name for row in rows for name in row["steps"] if name != "wait")
    times = {
        "method": lambda row: f"{row['method']} {row['ratio']:g}",
        "from": of("tier"),
        "tokens": of("prompt_tokens"),
        "full s": of("full_s", ".3g"),
        "ragkv s": of("ragkv_s", ".3g"),
        "speed-up": _speedup,
        "bound": lambda row: f"{row['full_s'] / row['bound_s']:.1f}x",
        "eff.": of("efficiency", ".0%"),
        "MB": lambda row: cell(row["peak_bytes"] and row["peak_bytes"] / 1e6, ".0f"),
    }
    steps = {
        "method": lambda row: f"{row['method']} {row['ratio']:g} {row['tier']}",
        "tokens": of("prompt_tokens"),
        **{name.replace("_", "\n"): _step(name) for name in names},
    }
    of_peers = {
        "engine": of("name"),
        "against": of("against"),
        "tokens": of("tokens"),
        "seconds": of("ttft_s", ".3g"),
        "speed-up": _speedup,
    }
    made = [table(title_of(found), caption, rows, times, words=2)]
    made.append(table("Steps", "Of the median round, in milliseconds.", rows, steps))
    if peers:
        caption = "speed-up: of ragkv's first token over the engine's; grey: quartiles."
        caption += builds_of(peers)
        made.append(table("Other engines on the same prompts", caption, peers, of_peers, words=2))
    return made


def _speedup(row: Found) -> str:
    return f"{row['speedup']:.1f}x\n{grey(row['quartiles'], '.1f')}"


def _step(name: str) -> Callable[[Found], str]:
    def shown(row: Found) -> str:
        milliseconds = 1000 * row["steps"].get(name, 0.0)
        return f"{milliseconds:.{int(milliseconds < 100)}f}"

    return shown
