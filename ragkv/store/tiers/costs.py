"""What computing tokens takes: a measured table of prefill seconds, read between its points."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache

from ragkv.errors import ConfigError
from ragkv.model.architecture import config_of
from ragkv.model.calls import cache_argument, require_used
from ragkv.model.loaded import LoadedModel

_CACHED, _NEW = (0, 512, 2048), (64, 256, 1024)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of a prefill of ``new`` tokens behind ``cached`` ones (RAGCache, section 5.1).

    Between the points it is interpolated bilinearly; beyond them, the outermost cell is
    carried on, never below 0. Fewer tokens than the first of ``new`` take at least their
    share of its seconds.

    Attributes
    ----------
    cached, new
        Ascending token counts: the table's axes. ``new`` has at least two.
    seconds
        ``[cached][new]``.
    """

    cached: tuple[int, ...]
    new: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        whole = len(self.seconds) == len(self.cached) >= 1 and len(self.new) >= 2
        ascending = all(list(axis) == sorted(set(axis)) for axis in (self.cached, self.new))
        if not whole or not ascending or any(len(row) != len(self.new) for row in self.seconds):
            raise ConfigError(
                "a cost table needs ascending lengths and, for each of the cached ones, a row of "
                "seconds as long as the new ones, of which there are at least two"
            )

    @classmethod
    def at_rate(cls, tokens_per_second: float) -> Self:
        """Return the table of a model whose every token costs the same."""
        return cls((0,), (0, 1), ((0.0, 1.0 / tokens_per_second),))

    @property
    def is_flat(self) -> bool:
        """Whether it is a mere rate, as :meth:`at_rate` returns."""
        return self.new == (0, 1)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Return the table that :meth:`to_dict` wrote; ConfigError where it is none."""
        try:
            rows = tuple(tuple(map(float, row)) for row in fields["seconds"])
            return cls(tuple(map(int, fields["cached"])), tuple(map(int, fields["new"])), rows)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no table of prefill costs: {error!r}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types."""
        return asdict(self)

    def __call__(self, cached: int, new: int) -> float:
        """Return the seconds that a prefill of ``new`` tokens behind ``cached`` ones takes."""
        if 0 < new < self.new[0]:
            share = new / self.new[0] * self._read(cached, self.new[0])
            return max(share, self._read(cached, new))
        return self._read(cached, new)

    def _read(self, cached: int, new: int) -> float:
        row, down = _cell(self.cached, cached)
        column, right = _cell(self.new, new)
        above = _between(self.seconds[row], column, right)
        if len(self.cached) == 1:
            return max(0.0, above)
        below = _between(self.seconds[row + 1], column, right)
        return max(0.0, above + (below - above) * down)


def _cell(axis: Sequence[int], at: float) -> tuple[int, float]:
    """Return the cell of an axis that ``at`` lies in (or next to), and where in it."""
    if len(axis) == 1:
        return 0, 0.0
    left = min(max(bisect_right(axis, at) - 1, 0), len(axis) - 2)
    return left, (at - axis[left]) / (axis[left + 1] - axis[left])


def _between(row: Sequence[float], column: int, share: float) -> float:
    return row[column] + (row[column + 1] - row[column]) * share


ALIKE = CostTable.at_rate(1.0)
"""Counts every token alike; given to a store, it has nothing measured."""


@torch.no_grad()
def measure_costs(
    loaded: LoadedModel,
    cached: Sequence[int] = _CACHED,
    new: Sequence[int] = _NEW,
    *,
    repeats: int = 2,
    budget_s: float = math.inf,
    pass_s: float = math.inf,
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> CostTable:
    """Measure prefills on a loaded model; lengths beyond its positions are left out.

    Parameters
    ----------
    cached, new
        Ascending token counts.
    repeats
        Runs a point; the fastest counts.
    budget_s, pass_s
        Seconds that all passes may take, and a single one. What is expected to take longer is left
        out, but for the shortest pass, which alone gives a rate.
    turn
        Entered around each pass: the model's lock.
    """
    limit = loaded.positions or cached[-1] + new[-1]
    new = [count for count in new if count <= limit // 2]
    if len(new) < 2:
        new = [limit // 4, limit // 2]
    cached = [count for count in cached if count + new[-1] <= limit]
    prefills = _Prefills(loaded, cached[-1] + new[-1], budget_s, pass_s, turn)
    slowest = prefills.warm_up(new[0])
    if slowest > budget_s:
        return CostTable.at_rate(new[0] / slowest)
    rows: list[list[float]] = []
    for count in cached:
        row = prefills.row(count, new, repeats)
        if not rows:
            new = new[: len(row)]
        if len(row) < len(new):
            break
        rows.append(row)
    if len(new) == 1:
        return CostTable.at_rate(new[0] / rows[0][0])
    return CostTable(tuple(cached[: len(rows)]), tuple(new), tuple(map(tuple, rows)))


class _Prefills:
    """Prefills of random tokens within a budget."""

    def __init__(
        self,
        loaded: LoadedModel,
        tokens: int,
        budget_s: float,
        pass_s: float,
        turn: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._loaded = loaded
        self._left, self._pass_s, self._turn = budget_s, pass_s, turn
        self._per_token = 0.0
        vocabulary = int(config_of(loaded.model).vocab_size)
        draw = torch.Generator().manual_seed(0)
        self._ids = torch.randint(vocabulary, (1, tokens), generator=draw).to(loaded.device)

    def warm_up(self, new: int) -> float:
        """Return the seconds of a prefill outside of the budget: the first of a thread is slow."""
        with self._turn():
            return self._timed(DynamicCache(), 0, new)

    def row(self, cached: int, new: Sequence[int], repeats: int) -> list[float]:
        """Return the seconds of each of ``new`` behind ``cached`` tokens; fewer, out of budget."""
        cache, filled, row = DynamicCache(), 0, list[float]()
        while filled < cached:
            piece = min(new[-1], cached - filled)
            if not self._fits(piece):
                return row
            self._run(cache, filled, piece)
            filled += piece
        for count in new:
            seconds = math.inf
            for _ in range(repeats):
                if not self._fits(count):
                    break
                seconds = min(seconds, self._run(cache, cached, count))
                cache.crop(-count)
            if seconds == math.inf:
                break
            row.append(seconds)
        return [min(row[at:]) for at in range(len(row))]  # fewer tokens never take longer

    def _run(self, cache: DynamicCache, cached: int, new: int) -> float:
        with self._turn():
            seconds = self._timed(cache, cached, new)
        self._left -= seconds
        self._per_token = seconds / new
        return seconds

    def _timed(self, cache: DynamicCache, cached: int, new: int) -> float:
        """Return the seconds of one prefill of ``new`` tokens behind the ``cached`` ones."""
        ids = self._ids[:, cached : cached + new]
        started = time.perf_counter()
        given = cache_argument(self._loaded.model, cache)
        out = self._loaded.model(ids, use_cache=True, logits_to_keep=1, **given)
        require_used(cache.get_seq_length(), cached + new, "rows in the cache")
        out.logits.sum().item()  # waits for the device
        return time.perf_counter() - started

    def _fits(self, tokens: int) -> bool:
        expected = tokens * self._per_token
        return expected <= min(self._left, self._pass_s)
