"""ragkv's attention in transformers' attention interface, beside ordinary calls.

A pass switches the attention in the model's configuration, for all threads. The new name includes
the previous one, so that an ordinary call of another thread gets its usual mask and attention.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from ragkv.errors import ModelInUseError, UnsupportedModelError

NAME = "ragkv"
_SERVED = ("sdpa", "eager")
_IN_USE = (
    "One of ragkv's passes runs on this model, and a concurrent ordinary call cannot be computed "
    "with its attention, {before!r}. Call the model inside `with kv.turn():`, or load it with "
    "attn_implementation='sdpa'."
)
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class _RunningPass(NamedTuple):
    """A pass, its model's configuration, and the configuration's own attention."""

    described: Any
    config: PreTrainedConfig
    own: str | None


class _Passes(threading.local):
    """The running passes of a thread."""

    def __init__(self) -> None:
        self.passes: list[_RunningPass] = []


_running = _Passes()


@contextmanager
def run_pass(config: PreTrainedConfig, attention: Attention, described: object) -> Iterator[None]:
    """Switch a configuration to ragkv's attention in the block, with its model's lock held.

    No masks are made for this thread's calls: positions limit the keys of a pass's rows.

    Parameters
    ----------
    attention
        Takes ``before`` in addition to transformers' arguments.
    described
        The result of :func:`running_pass` in the block.
    """
    own = config._attn_implementation  # noqa: SLF001
    config._attn_implementation = register_over(own, attention)  # noqa: SLF001
    _running.passes.append(_RunningPass(described, config, own))
    try:
        yield
    finally:
        _running.passes.pop()
        config._attn_implementation = own  # noqa: SLF001


@contextmanager
def pass_suspended(config: PreTrainedConfig) -> Iterator[None]:
    """Restore a configuration's own attention in the block, between the layers of a pass.

    Another thread can use the model there, and end its own pass later than this one.
    """
    switched = config._attn_implementation  # noqa: SLF001
    own = [each.own for each in _running.passes if each.config is config]
    config._attn_implementation = own[0] if own else switched  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation = switched  # noqa: SLF001


def register_over(before: str | None, attention: Attention) -> str:
    """Register ragkv's attention over an implementation; return the combined name."""
    if before is not None and before.startswith(NAME):
        return before
    name = f"{NAME} over {before}" if before in _SERVED else NAME
    AttentionInterface.register(name, partial(attention, before=before))
    AttentionMaskInterface.register(name, partial(_mask, before=before))
    return name


def is_innermost(described: object) -> bool:
    """Return whether this thread runs the pass now, and no other pass between its layers."""
    return bool(_running.passes) and _running.passes[-1].described is described


def runs_pass() -> bool:
    """Return whether this thread runs a pass, so that none of its calls is ordinary."""
    return bool(_running.passes)


def running_pass(module: torch.nn.Module) -> Any:
    """Return this thread's pass over a layer; None is an ordinary call.

    For layers that do not forward their model's arguments (StableLM, Nemotron).

    Raises
    ------
    UnsupportedModelError
        The running pass is given only by its call's arguments.
    """
    for each in reversed(_running.passes):
        if each.config is getattr(module, "config", None):
            if each.described is None:
                raise UnsupportedModelError(
                    f"{type(module).__name__} does not get its model's arguments, which "
                    "this method needs: use another, or method='full'."
                )
            return each.described
    return None


def ordinary_attention(
    before: str | None, module: torch.nn.Module, *args: Any, **given: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as the model does without ragkv.

    Raises
    ------
    ModelInUseError
        The implementation makes masks of its own.
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
    if any(config is each.config for each in _running.passes):
        return None
    if before not in _SERVED:
        raise ModelInUseError(_IN_USE.format(before=before))
    known: Any = AttentionMaskInterface
    return known()[before](*args, config=config, **given)
