"""A model's modules and weights, several times faster than by torch's own methods."""

from __future__ import annotations

import torch


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model and all modules in it; one that is in two places appears twice."""
    found = [model]
    for module in found:  # it grows
        found += [part for part in module._modules.values() if part is not None]  # noqa: SLF001
    return found


def parameters_of(modules: list[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return the modules' own parameters."""
    return [
        part
        for module in modules
        for part in module._parameters.values()  # noqa: SLF001
        if part is not None
    ]


def buffers_of(modules: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the modules' own buffers."""
    return [
        part
        for module in modules
        for part in module._buffers.values()  # noqa: SLF001
        if part is not None
    ]
