"""Stretches of neighbouring positions, and the recomputed rows that predict their shift."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Stretches(NamedTuple):
    """A prompt's input to :func:`ragkv_kernels.drift`, the same for all layers.

    Attributes
    ----------
    weights
        ``[stretches, length, most]`` float32: each position's weights on its stretch's observed
        rows; 0 for padding.
    firsts, counts
        ``[stretches]`` int64: the first of the observed rows that are a stretch's, and how many.
    starts, lengths
        ``[stretches]`` int64: first position and number of positions. No two overlap.
    positions
        ``[observed]`` int64: of the observed rows.
    sources
        ``[observed]`` int64: their rows among the fresh ones; below 0 ``~row`` of ``earlier``
        shifts.
    sizes
        ``[observed]`` float32: divisors of the shifts' lengths.
    fixed
        ``[end]`` bool: positions that do not move.
    """

    weights: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor
    sizes: torch.Tensor
    fixed: torch.Tensor
