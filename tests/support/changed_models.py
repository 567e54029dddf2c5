"""Changes of a model after its passes were captured as graphs."""

import copy

import torch

from ragkv import RagKV


def other_weights(kv: RagKV) -> None:
    """Weights at other addresses, as after ``model.to``."""
    for parameter in kv.loaded.model.parameters():
        parameter.data = parameter.data.clone() * 1.5


def other_layer(kv: RagKV) -> None:
    layer = kv.loaded.model.model.layers[1]
    layer.mlp = copy.deepcopy(layer.mlp)
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(-2)


def other_attention(kv: RagKV) -> None:
    """Passes have ragkv's attention in any case: the graphs stay."""
    kv.loaded.model.set_attn_implementation("eager")
