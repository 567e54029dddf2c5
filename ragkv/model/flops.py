"""FLOPs of computing tokens, from the model's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ragkv.model.architecture import backbone_of, config_of
from ragkv.model.loaded import ReusableModel


def prefill_flops_of(loaded: ReusableModel) -> Callable[[int, int], float]:
    """Return a function for the FLOPs of computing ``new`` tokens after ``cached`` ones.

    In a mixture of experts, only a token's active experts count.
    """
    model, shape = loaded.model, loaded.architecture
    config = config_of(model)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", None) or 1
    share = active / experts if experts else 1.0
    weights = sum(
        weight.numel() * (share if ".experts." in name else 1.0)
        for name, weight in backbone_of(model).layers.named_parameters()
    )
    heads = getattr(config, "num_attention_heads", shape.kv_heads)
    return partial(prefill_flops, weights, heads * shape.head_dim, shape.windows)


def prefill_flops(
    weights: float, width: int, windows: Sequence[int | None], cached: int, new: int
) -> float:
    """Return the FLOPs of computing ``new`` tokens after ``cached`` ones.

    Parameters
    ----------
    weights
        Number of weights of all layers that each token is multiplied by.
    width
        Number of query heads times their dimension.
    windows
        The sliding window of each layer in tokens, or None.
    """
    pairs = 0  # of a query and a key that it attends to
    for window in windows:
        inside = new if window is None else min(new, max(0, window - cached))
        pairs += inside * cached + inside * (inside + 1) // 2 + (new - inside) * (window or 0)
    return 2.0 * weights * new + 4.0 * width * pairs
