"""From scores to positions: spreading, budgets and windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ragkv.config import ReuseConfig
from ragkv.select.method import FloatArray, Grouping, Method, Scene, Scored, Spread
from ragkv.splice.buffer import BeforeWrite
from ragkv.splice.layout import Layout, Origin
from ragkv.store.version import NO_CONTEXT, PlacedVersion

Positions = npt.NDArray[np.int64]

TARGET, FLOOR, CEILING = 0.8, 0.05, 0.4
"""``"auto"`` by attention: the share of the query's attention that the recomputed tokens cover,
and the least and the largest share of the cached tokens."""

ALPHA = 1.0
"""``"auto"`` by overhead: the factor of each chunk's cache fix overhead."""

SAVED = 0.5
"""Share of the recomputation that tokens with exact history save; the rest of it goes to others."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The positions to recompute, and the reason.

    Attributes
    ----------
    positions
        Prompt positions to recompute, sorted.
    scores
        ``[cached]`` float32: the ranking; None if nothing was scored.
    ratio
        The requested share of the cached tokens.
    reason
        The reason of ``"auto"`` in one sentence; empty for a given ratio.
    mover
        The rule's function to move other tokens, see :class:`ragkv.select.method.Scored`.
    """

    positions: Positions
    scores: FloatArray | None = None
    ratio: float = 0.0
    reason: str = ""
    mover: Callable[[Positions], BeforeWrite] | None = None


def takes_all(layout: Layout, config: ReuseConfig) -> bool:
    """Whether the ratio chooses every cached token: an ordinary full prefill."""
    ratio, count = config.recompute_ratio, len(layout.cached)
    return ratio != "auto" and round(ratio * count) >= count


def choose(method: Method, scene: Scene, config: ReuseConfig) -> Choice:
    """Choose the cached positions to recompute.

    ``config.recompute_ratio`` is a share of the cached tokens: 0 chooses none and 1 all, without
    scoring. Below 1, tokens with exact entries are never chosen. Chosen tokens that have an earlier
    prompt's row are free. Chunks of an earlier prompt that this one continues, or repeats, are not
    scored again. Versions that fit take less of the budget, and tokens with exact history half
    of a given ratio's.
    """
    layout = scene.layout
    cached, known = layout.cached, layout.known
    ratio = config.recompute_ratio
    if takes_all(layout, config):
        return Choice(np.setdiff1d(cached, known, assume_unique=True), ratio=1.0)
    new = cached >= layout.continued
    stale = (cached >= layout.exact) & new
    is_repeated = layout.history is not None and len(layout.fresh) == 1
    is_done = is_repeated or not stale.any() or not len(layout.stale(known))
    if is_done or ratio == 0 or method.score is None:
        nothing = 0.0 if method.score is None else FLOOR if ratio == "auto" else ratio
        return Choice(cached[:0], ratio=nothing)
    found = method.score(scene)
    scores, mover = found if isinstance(found, Scored) else (found, None)
    fit = _fit_of_versions(method, layout)
    scores = scores * fit if method.auto == "attention" else scores
    paid = scores
    if method.spread is not None:
        scores = convolved(scores, cached, _kernel(method.spread))
    ranks = np.argsort(-scores.astype(np.float64), kind="stable")
    ranks = ranks[stale[ranks]]
    reason, counted = "", float(fit[new].sum())
    if ratio == "auto":
        by_what = overhead_ratio if method.auto == "overhead" else attention_ratio
        ratio, reason = by_what(paid[ranks], int(new.sum()))
    else:
        counted -= SAVED * int((stale & (layout.origin[cached] == Origin.EXACT)).sum())
    budget = round(ratio * counted)
    if method.grouping is None:
        positions = np.sort(cached[ranks[:budget]])
    else:
        positions = _whole_windows(layout, cached[stale], cached[ranks], budget, method.grouping)
    positions = np.setdiff1d(positions, known, assume_unique=True)
    return Choice(positions, scores, ratio, reason, mover)


def _fit_of_versions(method: Method, layout: Layout) -> FloatArray:
    """Return ``[cached]`` the share of the repair that tokens need: 1 for those of entries.

    For a version's tokens it is the version's cache fix overhead relative to an entry's
    :data:`NO_CONTEXT`, or 1 if the scores include it already (Cache-Craft).
    """
    cached = layout.cached
    fit = np.ones(len(cached), dtype=np.float32)
    for piece in layout.placed:
        if isinstance(piece.entry, PlacedVersion) and method.auto != "overhead":
            fit[np.searchsorted(cached, piece.slots)] = min(1, piece.entry.overhead / NO_CONTEXT)
    return fit


def convolved(scores: FloatArray, cached: Positions, kernel: npt.NDArray[np.float64]) -> FloatArray:
    """Convolve scores with an odd kernel over the prompt; uncached positions count 0."""
    dense = np.zeros(int(cached[-1]) + 1 + len(kernel), dtype=np.float64)
    dense[cached] = scores
    return np.convolve(dense, kernel, mode="same")[cached].astype(np.float32)


def _kernel(spread: Spread) -> npt.NDArray[np.float64]:
    reach = math.ceil(5 * spread.within)  # less than exp(-5) is dropped
    kernel = spread.share * np.exp(-np.abs(np.arange(-reach, reach + 1)) / spread.within)
    kernel[reach] = 1.0
    return kernel


def attention_ratio(paid: FloatArray, cached: int) -> tuple[float, str]:
    """Return the smallest share of the cached tokens with the target share of attention.

    Parameters
    ----------
    paid
        ``[tokens]`` the query's attention to the candidates, best first.
    cached
        Number of all cached tokens.
    """
    mass = np.cumsum(paid.astype(np.float64))
    share = mass / max(mass[-1], 1e-30)
    needed = min(len(paid), int(np.searchsorted(share, TARGET)) + 1) / cached
    ratio = min(max(needed, FLOOR), CEILING)
    count = min(round(ratio * cached), len(share))
    covered = share[count - 1] if count else 0.0
    bound = "" if ratio == needed else f", bounded by {FLOOR:g} and {CEILING:g}"
    return ratio, (
        f"{needed:.1%} of the cached tokens hold {TARGET:.0%} of the query's attention to "
        f"them; {ratio:.1%} chosen{bound}, holding {covered:.0%}"
    )


def overhead_ratio(paid: FloatArray, cached: int) -> tuple[float, str]:
    """Return the share that Cache-Craft recomputes, ``ceil(CFO |Ci|)`` tokens of each chunk.

    The parameters are those of :func:`attention_ratio`; scores above ``-ALPHA`` are recomputed.
    """
    ratio = int((paid > -ALPHA).sum()) / cached
    return ratio, f"the cache fix overhead of the chunks is {ratio:.1%} at alpha {ALPHA:g}"


def _whole_windows(
    layout: Layout, cached: Positions, ranking: Positions, budget: int, grouping: Grouping
) -> Positions:
    """Return all windows with more than ``threshold`` chosen tokens (CacheClip's second version).

    Windows slide by one token within a chunk; a shorter chunk is one window. The ratio counts after
    grouping: as many tokens are chosen, in the order of ``ranking``, as their windows fit the
    budget. The windows grow with that number, so bisection finds it.
    """
    starts = [piece.start for piece in layout.placed]

    def apart(positions: Positions) -> Positions:
        """Move the chunks apart, so that no window reaches into the next chunk."""
        return positions + grouping.window * np.searchsorted(starts, positions, side="right")

    slots, ranked = apart(cached), apart(ranking)
    size = int(slots[-1]) + 2 * grouping.window

    def windows_of(count: int) -> Positions:
        chosen = np.zeros(size, dtype=np.int64)
        chosen[ranked[:count]] = 1
        whole = _sums(chosen, grouping.window) > grouping.threshold  # by each window's end
        # a position is in such a window if one ends there or up to window - 1 after it
        near = _sums(whole[::-1].astype(np.int64), grouping.window)[::-1] > 0
        return cached[near[slots]]

    low, high = 0, len(ranking)
    while low < high:
        middle = (low + high + 1) // 2
        if len(windows_of(middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return windows_of(low)


def _sums(numbers: npt.NDArray[Any], window: int) -> npt.NDArray[Any]:
    """Return for each position the sum over the ``window`` positions that end there."""
    total = np.cumsum(numbers)
    total[window:] -= total[:-window].copy()
    return total
