"""What an attention gives back."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Attended(NamedTuple):
    """What :func:`ragkv_kernels.attend` returns.

    Attributes
    ----------
    out
        ``[heads, rows, head_dim]``, of the query's dtype.
    lse
        ``[heads, rows]`` float32: natural log-sum-exp of each row's scaled scores; None
        where it was not asked for.
    received
        ``[tokens]`` float32: what each key receives from the watched rows together, mean
        over heads; sums to the number of watched rows. None where none is watched.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    received: torch.Tensor | None
