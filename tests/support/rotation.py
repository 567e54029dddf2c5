"""Keys rotated and unrotated by the model's own tables, one at a time."""

import inspect
from functools import lru_cache
from typing import Any

import torch

from ragkv import RagKV


def turned(engine: RagKV, layer: int, keys: torch.Tensor, place: int, sign: int) -> torch.Tensor:
    """One key ``[kv_heads, head_dim]``, turned to (1) or back from (-1) its place."""
    architecture = engine.loaded.architecture
    assert architecture is not None
    table = architecture.rope_kinds[layer].table
    cos, sin = _angles(engine.loaded.model.model.rotary_emb, table, place, keys.dtype)
    size = cos.square() + sin.square()  # yarn's tables are longer than one
    if sign < 0:
        cos, sin = cos / size, -sin / size
    part = keys[:, : len(cos)]
    first, second = part.chunk(2, dim=-1)
    out = keys.clone()
    out[:, : len(cos)] = part * cos + torch.cat([-second, first], dim=-1) * sin
    return out


@lru_cache(maxsize=4096)
def _angles(
    rotary: torch.nn.Module, table: Any, place: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    kind = [table] if "layer_type" in inspect.signature(rotary.forward).parameters else []
    like = torch.empty(0, dtype=dtype)
    return tuple(part[0, 0] for part in rotary(like, torch.tensor([[place]]), *kind))
