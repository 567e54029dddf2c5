"""How everything here is timed and compared: in turn, by the ratio within each round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from ragkv import ReuseConfig, StoreConfig
from ragkv.config import MEMORY
from ragkv.errors import ConfigError

Done = TypeVar("Done")
MIN_CHUNK_TOKENS = 16
IN_MEMORY = StoreConfig(MEMORY, memory_bytes=1 << 50, device_bytes=0, history_bytes=0)
"""A store that keeps every chunk in memory, and no history."""


@dataclass(frozen=True, slots=True)
class AnswerTime:
    """One answer's seconds to its first and its last token, and its tokens a step."""

    ttft_s: float
    total_s: float
    tokens_per_step: float = 1.0


def medians(times: Sequence[AnswerTime], count: int) -> dict[str, float]:
    """Return the median first token and total, and between them milliseconds a later token."""
    ttft_s = statistics.median(each.ttft_s for each in times)
    total_s = statistics.median(each.total_s for each in times)
    ms_per_token = 1e3 * (total_s - ttft_s) / (count - 1)
    return {"ttft_s": ttft_s, "ms_per_token": ms_per_token, "total_s": total_s}


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(device: torch.device, call: Callable[[], Done]) -> tuple[float, Done]:
    """Return a call's seconds and its result; before it the device is idle."""
    synchronise(device)
    started = time.perf_counter()
    found = call()
    return time.perf_counter() - started, found


def ratio_of(first: Iterable[float], second: Iterable[float]) -> tuple[float, tuple[float, float]]:
    """Return median and quartiles over rounds of the first times over the second ones."""
    return median_of([one / other for one, other in zip(first, second, strict=True)])


def median_of(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return median and quartiles."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return median, (low, high)


def check_plan(plan: Any, *lists: str) -> None:
    """Raise ConfigError for a list that is empty or names something twice, and wrong numbers."""
    for name in lists:
        values = getattr(plan, name)
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"give one or more different {name}, not {list(values)}")
    if min(*plan.tokens, plan.rounds) < 1:
        raise ConfigError("tokens and rounds must be 1 or more")
    if getattr(plan, "chunk_tokens", MIN_CHUNK_TOKENS) < MIN_CHUNK_TOKENS:
        raise ConfigError(f"chunk_tokens must be {MIN_CHUNK_TOKENS} or more")
    for ratio in getattr(plan, "ratios", ()):
        ReuseConfig(recompute_ratio=ratio)
