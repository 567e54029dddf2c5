"""Decoder layers in steps of few rows, by a third of transformers' operations."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection
from functools import cache, lru_cache
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragkv.model.calls import cache_in
from ragkv.model.implementation import implementation_for
from ragkv.model.quantised import INT4_ROWS

_ALIKE = [f"transformers.models.{n}.modeling_{n}" for n in ("llama", "mistral", "qwen2", "qwen3")]
Forward = Callable[..., Any]


def step_forward(fast: Any, layer: Any) -> Forward:
    """Return a layer's ``forward``: its own, but for few rows of passes in ``fast.threads``."""
    attention, mlp, at = layer.self_attn, layer.mlp, layer.self_attn.layer_idx
    heads, width = [attention.q_proj, attention.k_proj, attention.v_proj], attention.head_dim
    groups = heads, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]
    counts = [part.out_features // width for part in heads]
    norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    before, between = (
        (each.weight.shape, each.weight, each.variance_epsilon)
        for each in (layer.input_layernorm, layer.post_attention_layernorm)
    )
    products = cache(lambda: [fast.together(group) for group in groups])

    def forward(hidden: torch.Tensor, **given: Any) -> Any:
        one, rows = given.get("ragkv_pass"), hidden[0]
        few = len(rows) <= INT4_ROWS and threading.get_ident() in fast.threads
        if one is None or not few or implementation_for("quantised", hidden) != "rounded":
            return type(layer).forward(layer, hidden, **given)
        (cos, sin), (qkv, out, gate_up, down) = _tables(given["position_embeddings"]), products()
        fresh = qkv(torch.rms_norm(rows, *before)).view(len(rows), -1, width).transpose(0, 1)[None]
        query, key, value = fresh.split_with_sizes(counts, dim=1)
        turned = torch.cat([norms[0](query), norms[1](key)], 1) if norms else fresh[:, : -counts[2]]
        turned = (turned * cos).addcmul_(turned.roll(width // 2, -1), sin)
        query, key = turned.split_with_sizes(counts[:2], dim=1)
        key, value = cache_in(given).update(key, value, at)
        how = {"sliding_window": one.windows[at], "scaling": attention.scaling, "ragkv_pass": one}
        attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]  # noqa: SLF001
        mixed, _ = attend(attention, query, key, value, given.get("attention_mask"), **how)
        rows = rows + out(mixed.view(len(rows), -1))
        gate, up = gate_up(torch.rms_norm(rows, *between)).chunk(2, -1)
        return (rows + down(mlp.act_fn(gate) * up))[None]

    return forward


@lru_cache(maxsize=2)
def _tables(cos_sin: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = cos_sin[1].chunk(2, -1)
    return cos_sin[0], torch.cat([-first, second], -1)


def suits_steps(layer: Any, linear: Collection[Any]) -> bool:
    """Whether a layer, whose linear ones may be replaced, is transformers' own and unobserved."""
    if (home := type(layer).__module__) not in _ALIKE:
        return False
    parts = {*layer.children(), *layer.self_attn.children(), *layer.mlp.children()}
    own = {layer, *parts} - {*linear, layer.mlp.act_fn}
    return not any(part._forward_hooks or part._forward_pre_hooks for part in parts) and all(  # noqa: SLF001
        "forward" not in vars(part) and inspect.unwrap(type(part).forward).__module__ == home
        for part in own
    )
