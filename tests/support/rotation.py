"""Keys rotated and unrotated by the model's own tables, one at a time."""

from __future__ import annotations

import inspect

import torch

from ragkv import RagKV


def turned(engine: RagKV, layer: int, keys: torch.Tensor, place: int, sign: int) -> torch.Tensor:
    """One key ``[kv_heads, head_dim]``, turned to (1) or back from (-1) its place."""
    rotary = engine.model.model.rotary_emb
    architecture = engine.loaded.architecture
    assert architecture is not None
    kind = [architecture.rope_kinds[layer].table]
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        kind = []
    cos, sin = (part[0, 0] for part in rotary(keys, torch.tensor([[place]]), *kind))
    size = cos.square() + sin.square()  # yarn's tables are longer than one
    if sign < 0:
        cos, sin = cos / size, -sin / size
    part = keys[:, : len(cos)]
    first, second = part.chunk(2, dim=-1)
    out = keys.clone()
    out[:, : len(cos)] = part * cos + torch.cat([-second, first], dim=-1) * sin
    return out
