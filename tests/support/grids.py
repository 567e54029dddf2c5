"""Weights as quantised files have them, and tiny models with such weights."""

import torch
from tiny import tiny_model
from torch import nn
from transformers import PreTrainedModel

GRIDS = {  # of GGUF's types: levels, and neighbours that share a grid
    "Q4_0": (range(-8, 8), 32),
    "Q4_1": (range(16), 32),
    "Q5_0": (range(-16, 16), 32),
    "Q6_K": (range(-32, 32), 16),
    "Q8_0": (range(-127, 128), 32),
}


def on_a_grid(kind: str, out: int = 64, inner: int = 96) -> torch.Tensor:
    """Make weights as a file of that type gives them, with scales of 16 bits."""
    levels, group = GRIDS[kind]
    shape = out, inner // group
    generator = torch.Generator().manual_seed(len(kind) + len(levels))
    chosen = torch.randint(levels[0], levels[-1] + 1, (*shape, group), generator=generator)
    if kind == "Q8_0":
        chosen[..., 0] = -127  # a group's largest number sets its step
    step, low = torch.rand(2, *shape, 1, generator=generator).half().float()
    weight = chosen * (step + 0.1) + (low - 0.5) * (kind == "Q4_1")
    return weight.reshape(out, inner)


def quantised_model(family: str = "llama", kind: str = "Q4_1") -> PreTrainedModel:
    """A tiny model whose linear layers' weights are on a grid."""
    model = tiny_model(family)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight = on_a_grid(kind, *layer.weight.shape)
            layer.weight.data = weight / weight.std() * layer.weight.std()
    return model
