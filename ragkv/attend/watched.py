"""The parts of a model that a captured pass depends on, and what prevents a capture."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ragkv.model.fingerprint import adapters_of
from ragkv.model.loaded import ReusableModel
from ragkv.model.modules import buffers_of, modules_of, parameters_of


def obstacle(loaded: ReusableModel, hooked: str | None) -> str:
    """Return why a model's passes cannot be captured, or an empty text."""
    if loaded.architecture.position_limit is not None:
        return "the model's rotary table changes with the prompt's length"
    names = {type(module).__name__ for module in loaded.model.modules()}
    if any("Experts" in name for name in names):
        return "which experts of the model compute depends on the tokens"
    if hooked is not None:
        return f"a hook on {hooked or 'the model'}, which a graph would leave out"
    return ""


class Watched:
    """The parts of a model that a graph depends on.

    Attributes
    ----------
    structure
        The model's modules and the changes made to them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: torch.nn.Module = model
        self._modules = modules_of(model)
        self._weights = [*parameters_of(self._modules), *buffers_of(self._modules)]
        replaced = [vars(module).get("forward") for module in self._modules]
        foreign = [id(function) for function in replaced if _is_foreign(function)]
        adapters = adapters_of(model)
        self.structure = [*map(id, self._modules), *foreign, *adapters, model.training]

    @property
    def hooked(self) -> str | None:
        """The first module with a foreign hook, or None."""
        if not any(map(_has_hook, self._modules)):
            return None
        named = self._model.named_modules()
        return next(str(name) for name, module in named if _has_hook(module))

    def state(self) -> tuple[object, ...]:
        """Return the hooked module and the addresses of the weights; takes 0.1 ms."""
        return self.hooked, *[part.data_ptr() for part in self._weights]


def _has_hook(module: torch.nn.Module) -> bool:
    """Whether a module has a foreign hook."""
    hooks = module._forward_hooks, module._forward_pre_hooks  # noqa: SLF001
    return any(_is_foreign(hook) for each in hooks if each for hook in each.values())


def _is_foreign(function: object) -> bool:
    own = getattr(getattr(function, "func", function), "__module__", None)
    return function is not None and not str(own).startswith("ragkv.")
