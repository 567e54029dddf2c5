"""From scores to positions: the budget, and windows that stay whole."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ragkv.config import Grouping
from ragkv.select.method import FloatArray, Method, Scene

Positions = npt.NDArray[np.int64]


def choose(method: Method, scene: Scene, ratio: float, grouping: Grouping | None) -> Positions:
    """Return the cached positions to recompute, sorted.

    Parameters
    ----------
    ratio
        Share of the cached tokens. 0 chooses none and 1 all, without scoring.
    grouping
        Overrides the method's own grouping.
    """
    cached = scene.layout.cached
    budget = round(ratio * len(cached))
    if budget >= len(cached):
        return cached
    if budget == 0 or method.score is None:
        return cached[:0]
    scores = method.score(scene)
    windows = grouping or method.grouping
    if windows is None:
        return np.sort(cached[top(scores, budget)])
    if windows.mode == "fill":
        return _fill_windows(cached, scores, budget, windows.window)
    return _whole_windows(cached, top(scores, budget), windows)


def top(scores: FloatArray, count: int) -> Positions:
    """Return the indices of the ``count`` highest scores, in no order; ties by index."""
    order: Positions = np.argsort(-scores, kind="stable")
    return order[:count]


def _whole_windows(cached: Positions, chosen: Positions, grouping: Grouping) -> Positions:
    """Windows with more than ``threshold`` chosen tokens, whole (CacheClip)."""
    windows = cached // grouping.window
    counts = np.bincount(windows[chosen], minlength=int(windows[-1]) + 1)
    return cached[counts[windows] > grouping.threshold]


def _fill_windows(cached: Positions, scores: FloatArray, budget: int, window: int) -> Positions:
    """Windows by mean score until the budget is spent; the last one in part."""
    windows = cached // window
    sums = np.bincount(windows, weights=scores)
    counts = np.bincount(windows)
    means = sums / np.maximum(counts, 1)
    order = np.lexsort((cached, -means[windows]))
    return np.sort(cached[order[:budget]])
