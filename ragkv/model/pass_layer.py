"""Decoder layers of ragkv's passes on a CPU, with a third of transformers' operations."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragkv.model.calls import cache_in
from ragkv.model.implementation import has_bfloat16_products, implementation_for
from ragkv.model.quantised import QuantisedWeight, gated_product, int4_rows

_ALIKE = [f"transformers.models.{n}.modeling_{n}" for n in ("llama", "mistral", "qwen2", "qwen3")]
_TOGETHER = 512
"""Rows of a feed-forward whose intermediate results fit a processor's cache."""
Forward = Callable[..., Any]


def pass_forward(patches: Any, layer: Any) -> Forward:
    """Return a layer's ``forward``: its own, except for passes in patched threads.

    Only quantised weights with bfloat16 products make passes of many rows faster.
    """
    attention, mlp = layer.self_attn, layer.mlp
    index, head_dim = attention.layer_idx, attention.head_dim
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    counts = [part.out_features // head_dim for part in projections]
    names = "q_norm", "k_norm"
    head_norms = [getattr(attention, name) for name in names if hasattr(attention, name)]
    gated = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]

    @cache
    def parts() -> list[Forward]:
        """Return a norm; the joint products of q, k and v; of o; a norm; gate and up; down."""
        groups = projections, [attention.o_proj], gated[:2], gated[2:]
        qkv, out, gate_up, down = (patches.together(group) for group in groups)
        before, after = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        return [before, qkv, out, after, gate_up, down]

    @cache
    def gated_weights() -> list[QuantisedWeight]:
        """Return the weights of :func:`gated_product`; none where another product is faster."""
        linear = [*projections, attention.o_proj, *gated]
        is_fast = has_bfloat16_products() and all(part in patches.quantised for part in linear)
        is_gated = _is_silu(mlp.act_fn) and all(part.bias is None for part in gated)
        return [patches.quantised[part] for part in gated] if is_fast and is_gated else []

    def forward(hidden: torch.Tensor, **given: Any) -> Any:
        one: Any = given.get("ragkv_pass")
        count = hidden.shape[1]
        patched = one is not None and threading.get_ident() in patches.threads
        patched = patched and implementation_for("quantised", hidden) == "rounded"
        is_few = count <= int4_rows()
        weights = gated_weights() if patched and not is_few else []
        if not patched or not (is_few or weights):
            return type(layer).forward(layer, hidden, **given)
        before, qkv, out, after, gate_up, down = parts()
        rows = hidden[0]
        fresh = qkv(before(rows)).view(count, -1, head_dim).transpose(0, 1)[None]
        both, value = fresh.split_with_sizes([counts[0] + counts[1], counts[2]], dim=1)
        if head_norms:
            parted = zip(head_norms, both.split_with_sizes(counts[:2], dim=1), strict=True)
            both = torch.cat([norm(part) for norm, part in parted], dim=1)
        cos, sin = _tables(given["position_embeddings"])
        both = (both * cos).addcmul_(both.roll(head_dim // 2, -1), sin)
        query, key = both.split_with_sizes(counts[:2], dim=1)
        key, value = cache_in(given).update(key, value, index)
        attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]  # noqa: SLF001
        mixed, _ = attend(
            attention,
            query,
            key,
            value,
            given.get("attention_mask"),
            sliding_window=one.windows[index],
            scaling=attention.scaling,
            ragkv_pass=one,
        )
        if getattr(one, "last_row_ends", False) and index == len(one.windows) - 1:
            rows, mixed = rows[-1:], mixed[:, -1:]
        rows = rows + out(mixed.reshape(len(rows), -1))
        if weights:
            return _fed(rows, after, weights)[None]
        gate, up = gate_up(after(rows)).chunk(2, -1)
        return (rows + down(mlp.act_fn(gate) * up))[None]

    return forward


def _fed(rows: torch.Tensor, norm: Forward, weights: Sequence[QuantisedWeight]) -> torch.Tensor:
    """Add the feed-forward of some rows at a time in place, and return the rows."""
    for some in torch.split(rows, _TOGETHER):
        some.add_(gated_product(norm(some), *weights))
    return rows


def _is_silu(activation: Forward) -> bool:
    sample = torch.linspace(-4, 4, 9, device="cpu")
    return torch.equal(activation(sample), functional.silu(sample))


class _Norm:
    """A layer's RMS norm, in half the time of torch's on a CPU."""

    def __init__(self, norm: Any) -> None:
        width = len(norm.weight)
        self.weight = norm.weight.detach() * width**0.5
        self.least = torch.tensor((width * norm.variance_epsilon) ** 0.5, device=norm.weight.device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows divided by their root mean square, times the weight."""
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        normed: torch.Tensor = rows * self.weight / length.hypot_(self.least)
        return normed


@lru_cache(maxsize=2)
def _tables(cos_sin: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos, and sin with the sign that rolling by half the channels needs."""
    first, second = cos_sin[1].chunk(2, -1)
    return cos_sin[0], torch.cat([-first, second], -1)


def suits_passes(layer: Any, linear: Collection[Any]) -> bool:
    """Whether a layer is transformers' own and has no hooks; ``linear`` layers may be patched."""
    if (home := type(layer).__module__) not in _ALIKE:
        return False
    parts = {*layer.children(), *layer.self_attn.children(), *layer.mlp.children()}
    own = {layer, *parts} - {*linear, layer.mlp.act_fn}
    return not any(part._forward_hooks or part._forward_pre_hooks for part in parts) and all(  # noqa: SLF001
        "forward" not in vars(part) and inspect.unwrap(type(part).forward).__module__ == home
        for part in own
    )
