"""Calls of a model over a cache, whatever this version of transformers calls the argument."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import transformers
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from ragkv.errors import UnsupportedModelError

_NAMES = ("cache", "past_key_values", "cache_params")
"""Since transformers 5.24, and before; of recurrent models before."""


def cache_argument(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """Return a cache as the keyword argument of the model's call.

    See that the model used it by :func:`require_used`.
    """
    kind: Any = type(model)
    return {_name(kind): cache}


@lru_cache
def _name(kind: Any) -> str:
    for takes in (kind.forward, GenerationMixin.prepare_inputs_for_generation):
        for name in _NAMES:
            if name in inspect.signature(takes).parameters:
                return name
    raise UnsupportedModelError(f"{kind.__name__} takes no cache that is known. {_version()}")


def cache_in(values: Mapping[str, Any]) -> Any:
    """Return the cache among a model's outputs, or a call's keyword arguments; None for none."""
    return next((values[name] for name in _NAMES if name in list(values)), None)


def require_used(done: int, wanted: int, what: str) -> None:
    """Raise UnsupportedModelError unless a model did with what it was given all that it should.

    A model takes an argument that it does not know, and never looks at it; a hook under a name
    that is no more is never called. What is computed then is wrong.

    Parameters
    ----------
    done, wanted
        Numbers of rows, layers or calls.
    what
        What was counted.
    """
    if done != wanted:
        raise UnsupportedModelError(f"{what}: {done} instead of {wanted}. {_version()}")


def _version() -> str:
    return (
        "ragkv and this model understand each other no longer, or transformers "
        f"{transformers.__version__} is none that ragkv was tested with: install one that "
        "`pip show ragkv` requires, or load the model with on_unsupported='full'"
    )
