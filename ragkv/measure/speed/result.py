"""What a benchmark found: what ``ragkv bench ttft --json`` writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ragkv.measure.results import Saved, reading

Tier = Literal["memory", "disk"]


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
        :mod:`ragkv.measure.speed.time_bound`). ``peak_bytes`` is of a separate request, see
        :mod:`ragkv.measure.speed.memory`; None where it cannot be measured.
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
        :class:`ragkv.measure.speed.time_bound.Costs`, and the loading rates in bytes a second.
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
            low_high = [(one, tuple(one["quartiles"])) for one in saved["rows"] + saved["peers"]]
            parts = [one | {"quartiles": ends} for one, ends in low_high]
            count = len(saved["rows"])
            return cls(
                saved["model"],
                saved["device"],
                tuple(BenchRow(**part) for part in parts[:count]),
                tuple(PeerRow(**part) for part in parts[count:]),
                tuple(saved["costs"]),
                saved["setup"],
            )
