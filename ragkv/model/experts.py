"""How a mixture-of-experts model computes its experts: for one token, or for several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from transformers import PreTrainedModel


def decoding_experts(model: PreTrainedModel, rows: int) -> AbstractContextManager[None]:
    """Compute the experts of one row as transformers' decoding does, of several as its prefill."""
    if rows != 1:
        return nullcontext()
    switch: Any = model
    own: AbstractContextManager[None] = switch._optimize_model_for_decode()  # noqa: SLF001
    return own


def experts_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the implementation of a model's experts, by part of its configuration."""
    getter: Callable[[], dict[str, str]] = getattr(model, "get_experts_implementation", dict)
    return getter()


@contextmanager
def experts_by(model: PreTrainedModel, experts: dict[str, str]) -> Iterator[None]:
    """Compute experts by the implementation that was set before generation.

    On a GPU transformers switches to one that is fast for a single token, and copies the
    experts' weights for every further token.
    """
    now = experts_of(model)
    if now == experts:
        yield
        return
    switch: Any = model
    switch.set_experts_implementation(experts)
    try:
        yield
    finally:
        switch.set_experts_implementation(now)
