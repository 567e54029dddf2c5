"""Calls of a model over a cache, in any supported version of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import transformers
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from ragkv.errors import UnsupportedModelError

_NAMES = ("cache", "past_key_values", "cache_params")
"""Names since transformers 5.24, before it, and for recurrent models before it."""


def cache_argument(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """Return a cache as a keyword argument of the model's call.

    Check by :func:`require_used` that the model used it.
    """
    kind: Any = type(model)
    return {_name(kind): cache}


@lru_cache
def _name(kind: Any) -> str:
    for takes in (kind.forward, GenerationMixin.prepare_inputs_for_generation):
        for name in _NAMES:
            if name in inspect.signature(takes).parameters:
                return name
    raise UnsupportedModelError(
        f"{kind.__name__} takes no cache argument that ragkv knows. {_version()}"
    )


def cache_in(values: Mapping[str, Any]) -> Any:
    """Return the cache among a model's outputs, or a call's keyword arguments; None for none."""
    return next((values[name] for name in _NAMES if name in list(values)), None)


def decoding_experts(model: PreTrainedModel, rows: int) -> AbstractContextManager[None]:
    """Compute experts for one row as transformers' decoding does, for several as its prefill."""
    if rows != 1:
        return nullcontext()
    switch: Any = model
    own: AbstractContextManager[None] = switch._optimize_model_for_decode()  # noqa: SLF001
    return own


def require_used(done: int, required: int, what: str) -> None:
    """Raise UnsupportedModelError unless the model used its arguments as often as required.

    A model silently ignores an unknown argument, and never calls a hook whose name has changed; its
    results are then wrong.

    Parameters
    ----------
    done, required
        Numbers of rows, layers or calls.
    what
        Description of what was counted.
    """
    if done != required:
        raise UnsupportedModelError(f"{what}: {done} instead of {required}. {_version()}")


def _version() -> str:
    return (
        "This model is incompatible with ragkv, or transformers "
        f"{transformers.__version__} is not a tested version: install one that "
        "`pip show ragkv` requires, or load the model with on_unsupported='full'"
    )
