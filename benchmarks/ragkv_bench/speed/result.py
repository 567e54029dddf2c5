"""What a benchmark found: what ``ragkv bench ttft`` and ``answer`` write as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ragkv_bench.results import Saved, reading

Tier = Literal["memory", "disk"]
FULL = "full"
"""The method of a full prefill."""
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One setting at one prompt length, over all rounds.

    Attributes
    ----------
    tokens, prompt_tokens
        The requested length, and the median prompt's real one.
    tier
        Where the chunks' caches are: in memory, or in files that the system has cached.
    full_s
        Median seconds to the first token by full prefill.
    ragkv_s, steps, computed_tokens, bound_s, peak_bytes
        Of the round with the median time: its seconds, where they went (they sum to
        ``ragkv_s``), how many tokens it computed and the least that this must cost (see
        :mod:`ragkv_bench.speed.time_bound`). ``peak_bytes`` is of a separate request, see
        :mod:`ragkv_bench.speed.memory`; None where it cannot be measured.
    speedup, quartiles
        Median and quartiles over rounds of a full prefill's time over that of ragkv right
        after it.
    efficiency
        ``bound_s / ragkv_s``.
    """

    tokens: int
    method: str
    ratio: float
    tier: Tier
    full_s: float
    ragkv_s: float
    speedup: float
    bound_s: float
    efficiency: float
    steps: dict[str, float]
    peak_bytes: int | None
    quartiles: tuple[float, float]
    prompt_tokens: int
    computed_tokens: int
    rounds: int


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Another engine at one prompt length.

    Attributes
    ----------
    ttft_s
        Median seconds to its first token.
    speedup
        Median over the same prompts of its time over ragkv's with the setting ``against``.
    """

    name: str
    tokens: int
    ttft_s: float
    speedup: float
    quartiles: tuple[float, float]
    against: str


@dataclass(frozen=True, slots=True)
class Benchmark(Saved):
    """All rows, with what they were measured on.

    Attributes
    ----------
    costs
        For each length what a full prefill spends its time on, see
        :class:`ragkv_bench.speed.time_bound.Costs`, and the loading rates in bytes a second.
    setup
        Versions, threads and the like.
    """

    device: str
    rows: tuple[BenchRow, ...]
    peers: tuple[PeerRow, ...] = ()
    costs: tuple[dict[str, Any], ...] = ()
    setup: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Benchmark:
        """Read what :meth:`save` wrote.

        Raises
        ------
        ConfigError
            The file cannot be read or is not such a benchmark.
        """
        with reading(path, "{path} is not by `ragkv bench ttft`: {error!r}") as saved:
            rows, peers = _rows(BenchRow, saved["rows"]), _rows(PeerRow, saved["peers"])
            costs = tuple(saved["costs"])
            return cls(saved["model"], saved["device"], rows, peers, costs, saved["setup"])


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """One setting at one prompt and answer length: medians over rounds.

    Attributes
    ----------
    tokens
        Prompt tokens: as requested, or the data's median.
    ttft_s, ms_per_token, total_s
        Seconds from the call to the first token, milliseconds for each later one, and seconds
        from the call to the last one.
    tokens_per_step
        Tokens after the first over the model's calls for them.
    full_ttft_s, full_ms_per_token, full_total_s
        The same of transformers' own ``generate`` on the same prompt, just before.
    speedup_total, quartiles
        Median and quartiles over rounds of ``full_total_s / total_s``.
    """

    tokens: int
    answer_tokens: int
    method: str
    ratio: float
    ttft_s: float
    ms_per_token: float
    total_s: float
    tokens_per_step: float
    full_ttft_s: float
    full_ms_per_token: float
    full_total_s: float
    speedup_total: float
    quartiles: tuple[float, float]
    rounds: int


@dataclass(frozen=True, slots=True)
class AnswerPeerRow:
    """Another engine on the same prompts, with answers of the same number of tokens.

    ``speedup_total`` is its total over that of ragkv's first setting.
    """

    name: str
    tokens: int
    answer_tokens: int
    ttft_s: float
    ms_per_token: float
    total_s: float
    speedup_total: float
    quartiles: tuple[float, float]


@dataclass(frozen=True, slots=True)
class AnswerBenchmark(Saved):
    """All rows, with what they were measured on."""

    device: str
    rows: tuple[AnswerRow, ...]
    peers: tuple[AnswerPeerRow, ...] = ()
    setup: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> AnswerBenchmark:
        """Read what :meth:`save` wrote.

        Raises
        ------
        ConfigError
            The file cannot be read or is not such a benchmark.
        """
        with reading(path, "{path} is not by `ragkv bench answer`: {error!r}") as saved:
            rows, peers = _rows(AnswerRow, saved["rows"]), _rows(AnswerPeerRow, saved["peers"])
            return cls(saved["model"], saved["device"], rows, peers, saved["setup"])


def setting_name(row: BenchRow | AnswerRow) -> str:
    """Return how tables and pictures name a row's setting; a full prefill has no ratio."""
    return FULL if row.method == FULL else f"{row.method} {row.ratio:g}"


def _rows(kind: Callable[..., Row], saved: Sequence[dict[str, Any]]) -> tuple[Row, ...]:
    """Return saved rows; JSON has no tuples."""
    return tuple(kind(**row | {"quartiles": tuple(row["quartiles"])}) for row in saved)
