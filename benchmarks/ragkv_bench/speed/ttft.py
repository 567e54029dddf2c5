"""Full prefill and ragkv in turn, prompt after prompt, in one process."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.config import MEMORY
from ragkv.errors import ConfigError
from ragkv.model.loaded import LoadedModel, require_reusable
from ragkv.prompt.render import Prompt
from ragkv.report.account import ReuseReport
from ragkv.select import get_method
from ragkv.splice.layout import Origin
from ragkv_bench.speed.costs import copy_rate, median_costs, read_rate, synchronise, timed_prefill
from ragkv_bench.speed.memory import peak_growth
from ragkv_bench.speed.result import BenchRow, Tier
from ragkv_bench.speed.time_bound import Costs, Positions, bound_s
from ragkv_bench.speed.traces import MIN_CHUNK_TOKENS, RequestTrace, make_traces

UNBOUNDED = 1 << 50
"""Bytes: the memory tier keeps every chunk."""


def require_different(plan: object, *names: str) -> None:
    """Raise ConfigError for a plan's list that is empty or names something twice."""
    for name in names:
        values = getattr(plan, name)
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"give one or more different {name}, not {list(values)}")


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

    Raises
    ------
    ConfigError
        A list is empty, or holds what cannot be measured.
    """

    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192)
    chunk_tokens: int = 512
    ratios: tuple[float, ...] = (0.0, 0.1, 0.2)
    methods: tuple[str, ...] = ("query",)
    tiers: tuple[Tier, ...] = ("memory",)
    rounds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        require_different(self, "tokens", "ratios", "methods", "tiers")
        if min(self.tokens) < 1 or self.rounds < 1:
            raise ConfigError("tokens and rounds must be 1 or more")
        if self.chunk_tokens < MIN_CHUNK_TOKENS:
            raise ConfigError(f"chunk_tokens must be {MIN_CHUNK_TOKENS} or more")
        unknown = set(self.tiers) - set(get_args(Tier))
        if unknown:
            raise ConfigError(f"tiers are {' and '.join(get_args(Tier))}, not {unknown}")
        for ratio in self.ratios:
            ReuseConfig(recompute_ratio=ratio)
        for method in self.methods:
            if not get_method(method).uses_chunks:
                raise ConfigError(
                    f"method {method!r} reuses no chunks: name methods to compare with full prefill"
                )

    @property
    def settings(self) -> list[Setting]:
        """All combinations, in the order of the options."""
        return [
            Setting(method, ratio, tier)
            for method in self.methods
            for ratio in self.ratios
            for tier in self.tiers
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One round of one setting: ragkv's seconds and those of the full prefill before it."""

    full_s: float
    ragkv_s: float
    steps: dict[str, float]
    rows: Positions
    reused_tokens: int


@dataclass(slots=True, eq=False)
class Measured:
    """All that was measured at one prompt length."""

    trace: RequestTrace
    costs: Costs
    samples: dict[Setting, list[Sample]]
    peaks: dict[Setting, int | None]


class Bench:
    """The engines of a benchmark, one a tier, over one loaded model.

    Parameters
    ----------
    loaded
        A supported model.
    auxiliary_model
        See :class:`ragkv.ReuseConfig`.
    """

    def __init__(
        self, loaded: LoadedModel, plan: TtftPlan, *, auxiliary_model: str | None = None
    ) -> None:
        self._loaded, self._plan = require_reusable(loaded), plan
        self._architecture = self._loaded.architecture
        self._reuse = ReuseConfig(auxiliary_model=auxiliary_model, on_miss="skip", load="always")
        self.rates: dict[Tier, float] = {}
        """Bytes a second from each tier to the device."""

    def run(self, *, show_progress: bool = False) -> list[Measured]:
        """Measure everything, length by length.

        Raises
        ------
        ConfigError
            A prompt cannot be made, or the model does not reuse its chunks.
        PromptTooLongError
            The model has fewer positions than a prompt has.
        """
        plan = self._plan
        count = len(plan.tokens) * plan.rounds * len(plan.settings)
        with (
            ExitStack() as stack,
            tqdm(total=count, disable=not show_progress, desc="ttft") as bar,
        ):
            bar.set_postfix_str("cutting the text into prompts")
            engines = {tier: stack.enter_context(self._engine(tier)) for tier in plan.tiers}
            first = next(iter(engines.values()))
            traces = make_traces(first, plan.tokens, plan.chunk_tokens, plan.rounds, plan.seed)
            return [self._measure(engines, trace, bar) for trace in traces]

    @contextmanager
    def _engine(self, tier: Tier) -> Iterator[RagKV]:
        """Open an engine whose every request gets its chunks from the tier."""
        rate = copy_rate(self._loaded.device)
        with ExitStack() as stack:
            store = StoreConfig(MEMORY, memory_bytes=UNBOUNDED, device_bytes=0, history_bytes=0)
            if tier == "disk":
                folder = tempfile.TemporaryDirectory(prefix="ragkv-bench-")
                rate = min(rate, read_rate(Path(stack.enter_context(folder))))
                place = Path(folder.name) / "store"
                store = StoreConfig(place, memory_bytes=0, device_bytes=0, history_bytes=0)
            self.rates[tier] = rate
            yield stack.enter_context(RagKV(self._loaded, store=store, reuse=self._reuse))

    def _measure(self, engines: dict[Tier, RagKV], trace: RequestTrace, bar: tqdm[Any]) -> Measured:
        settings = self._plan.settings
        for kv in engines.values():
            for method in self._plan.methods:
                bar.set_postfix_str(f"{trace.tokens} tokens: encoding chunks for {method}")
                kv.precompute(trace.chunks, method=method, sink=trace.sink)
        warm, *prompts = trace.prompts
        for setting in settings:
            bar.set_postfix_str(f"{trace.tokens} tokens: warming up {setting}")
            self._pair(engines, setting, trace, warm)
        samples: dict[Setting, list[Sample]] = {setting: [] for setting in settings}
        prefills = []
        for number, prompt in enumerate(prompts):
            first = number % len(settings)  # no setting always comes at the same place
            for setting in settings[first:] + settings[:first]:
                bar.set_postfix_str(f"{trace.tokens} tokens, {setting}", refresh=False)
                samples[setting].append(self._pair(engines, setting, trace, prompt))
                bar.update()
            prefills.append(timed_prefill(self._loaded, trace.ids[number + 1]))
        peaks = {}
        for setting in settings:
            request = partial(self._timed, engines, setting, trace, warm)
            self._loaded.workspace.release()  # or its memory were not counted
            peaks[setting] = peak_growth(request, self._loaded.device)
        return Measured(trace, median_costs(prefills, self._architecture.windows), samples, peaks)

    def _pair(
        self, engines: dict[Tier, RagKV], setting: Setting, trace: RequestTrace, prompt: Prompt
    ) -> Sample:
        """Time a full prefill, then ragkv on the same prompt."""
        kv = engines[setting.tier]
        full_s, _ = first_token(kv, prompt, method="full", recompute_ratio=1.0)
        ragkv_s, report = self._timed(engines, setting, trace, prompt)
        if report.misses:
            raise ConfigError(
                f"a chunk was not reused ({report.misses[0].reason}): this model's prompts of "
                f"{report.prompt_tokens} tokens are prefilled in full, so there is nothing to "
                "compare; give smaller --tokens"
            )
        rest = ragkv_s - report.ttft_s
        steps = {**report.steps, "first_token": report.steps["first_token"] + rest}
        origin = np.frombuffer(report.positions, dtype=np.uint8)
        rows: npt.NDArray[np.int64] = np.flatnonzero(origin >= Origin.RECOMPUTED)
        return Sample(full_s, ragkv_s, steps, rows, report.reused_tokens)

    @staticmethod
    def _timed(
        engines: dict[Tier, RagKV], setting: Setting, trace: RequestTrace, prompt: Prompt
    ) -> tuple[float, ReuseReport]:
        return first_token(
            engines[setting.tier],
            prompt,
            method=setting.method,
            recompute_ratio=setting.ratio,
            sink=trace.sink,
        )

    def rows(self, measured: Iterable[Measured]) -> list[BenchRow]:
        """Return one row a length and setting."""
        return [
            self._row(setting, one, samples)
            for one in measured
            for setting, samples in one.samples.items()
        ]

    def _row(self, setting: Setting, measured: Measured, samples: list[Sample]) -> BenchRow:
        median = sorted(samples, key=lambda sample: sample.ragkv_s)[(len(samples) - 1) // 2]
        load_s = median.reused_tokens * self._token_bytes / self.rates[setting.tier]
        bound = bound_s(measured.costs, median.rows, load_s)
        speedup, quartiles = middle([sample.full_s / sample.ragkv_s for sample in samples])
        return BenchRow(
            **asdict(setting),
            tokens=measured.trace.tokens,
            full_s=statistics.median(sample.full_s for sample in samples),
            ragkv_s=median.ragkv_s,
            speedup=speedup,
            bound_s=bound,
            efficiency=bound / median.ragkv_s,
            steps=median.steps,
            peak_bytes=measured.peaks[setting],
            quartiles=quartiles,
            prompt_tokens=measured.costs.tokens,
            computed_tokens=len(median.rows),
            rounds=len(samples),
        )

    @property
    def _token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        shape = self._architecture
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * self._loaded.dtype.itemsize


def first_token(kv: RagKV, prompt: Prompt, **overrides: Any) -> tuple[float, ReuseReport]:
    """Return the seconds from the call to the first token's id, and the engine's report.

    The device is idle before, and the id is on the host in the end: all work is inside.
    """
    synchronise(kv.loaded.device)
    started = time.perf_counter()
    prefilled = kv.prefill(prompt, **overrides)
    int(prefilled.logits.argmax())
    return time.perf_counter() - started, prefilled.report


def middle(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median and the two quartiles."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return median, (low, high)
