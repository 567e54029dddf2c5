"""Memory for keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch


def uninitialised(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return a tensor whose content is undefined; on the CPU in numpy's memory.

    numpy asks for huge pages where torch does not: filling them is 3x faster.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    flat = np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(*shape)
