"""Ordinary calls of a model that other threads make while one of ragkv's passes runs.

A pass switches the model's attention in its configuration, for all threads. So the name that
it is switched to says what it stood over, and under that name an ordinary call gets the mask
and the attention that it would have got: at any layer, whichever of the two is there first.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from ragkv.errors import ModelInUseError, UnsupportedModelError

NAME = "ragkv"
_SERVED = ("sdpa", "eager")
_IN_USE = (
    "One of ragkv's passes runs on this model, and an ordinary call beside it cannot be computed "
    "over its attention, {before!r}. Call the model inside `with kv.turn():`, or load it with "
    "attn_implementation='sdpa'."
)
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class _Here(threading.local):
    """The passes that run in this thread, each with its model's configuration."""

    def __init__(self) -> None:
        self.passes: list[tuple[PreTrainedConfig, Any]] = []


_here = _Here()


def switched(before: str | None, attention: Attention) -> str:
    """Register ragkv's attention over an implementation and return the name of both.

    Parameters
    ----------
    attention
        Takes ``before`` beside what transformers gives.
    """
    if before is not None and before.startswith(NAME):
        return before
    name = f"{NAME} over {before}" if before in _SERVED else NAME
    AttentionInterface.register(name, partial(attention, before=before))
    AttentionMaskInterface.register(name, partial(_mask, before=before))
    return name


@contextmanager
def own_pass(config: PreTrainedConfig, described: object) -> Iterator[None]:
    """Make no masks for the calls of the block: the rows' own positions limit what they see.

    Parameters
    ----------
    described
        What :func:`described_by_own` returns in the block.
    """
    _here.passes.append((config, described))
    try:
        yield
    finally:
        _here.passes.pop()


def described_by_own(module: torch.nn.Module) -> Any:
    """Return what the pass that runs over a layer in this thread is; None is an ordinary call.

    For layers that do not hand on what their model is called with (StableLM, Nemotron).

    Raises
    ------
    UnsupportedModelError
        Such a pass runs, and only those layers could have said which rows it has.
    """
    for config, described in reversed(_here.passes):
        if config is getattr(module, "config", None):
            if described is None:
                raise UnsupportedModelError(
                    f"{type(module).__name__} is not handed what its model is called with, which "
                    "this method needs: use another, or method='full'."
                )
            return described
    return None


def ordinary(
    before: str | None, module: torch.nn.Module, *args: Any, **given: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as the model does without ragkv.

    Raises
    ------
    ModelInUseError
        The implementation is one whose masks are its own affair.
    """
    home = sys.modules[type(module).__module__]
    known = getattr(home, "ALL_ATTENTION_FUNCTIONS", None)
    default = getattr(home, "eager_attention_forward", None)
    if before not in _SERVED or known is None or default is None:
        raise ModelInUseError(_IN_USE.format(before=before))
    out: tuple[torch.Tensor, torch.Tensor | None] = known.get_interface(before, default)(
        module, *args, **given
    )
    return out


def _mask(*args: Any, before: str | None, config: PreTrainedConfig, **given: Any) -> Any:
    """Make an ordinary call's mask, and none for a pass."""
    if any(config is own for own, _ in _here.passes):
        return None
    if before not in _SERVED:
        raise ModelInUseError(_IN_USE.format(before=before))
    known: Any = AttentionMaskInterface
    return known()[before](*args, config=config, **given)
