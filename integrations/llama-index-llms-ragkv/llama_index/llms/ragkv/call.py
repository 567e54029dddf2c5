"""From HuggingFaceLLM's and LlamaIndex's keyword arguments to the engine's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW

from ragkv.config import (
    GENERATION,
    engine_arguments,
    refuse_unsupported,
)

_log = logging.getLogger(__name__)
_OURS = ("stop", "seed", "json_schema")
"""Keys of ``generate_kwargs`` besides transformers' settings."""


def decode_arguments(
    generate_kwargs: Mapping[str, Any],
    call: Mapping[str, Any],
    *,
    max_new_tokens: int,
    generation_config: Any,
) -> dict[str, Any]:
    """Return the keyword arguments of ``RagKV.generate`` and ``stream``.

    transformers' settings are read by :func:`ragkv.config.generation.engine_arguments`. A
    ``temperature`` in the call itself takes precedence over ``do_sample``: 0 is greedy.

    Raises
    ------
    ConfigError
        An unsupported setting.
    """
    call = dict(call)
    lengths = (call.pop("max_tokens", None), call.pop("max_new_tokens", None))
    for length in lengths:
        if length is not None:
            call.setdefault("max_new_tokens", length)
    given = {**generate_kwargs, **call}
    if call.get("temperature") is not None:
        given["do_sample"] = bool(call["temperature"])
    settings = {name: given.pop(name) for name in GENERATION & given.keys()}
    out, unsupported = engine_arguments(settings, generation_config)
    unsupported |= {name: given[name] for name in generate_kwargs.keys() & given.keys() - {*_OURS}}
    refuse_unsupported(unsupported, others=_OURS)
    ends = (*out.pop("stop_token_ids", ()), *(given.pop("stop_token_ids", None) or ()))
    if ends:
        out["stop_token_ids"] = ends
    stop = (*_texts(given.pop("stop", None)), *out.pop("stop", ()))
    return {"max_new_tokens": max_new_tokens, **given, **out, "stop": stop}


def _texts(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def window_of(context_window: int | None, positions: int | None) -> int:
    """Return the context window: the positions that the model knows, or fewer where it is given."""
    if context_window is None:
        return positions or DEFAULT_CONTEXT_WINDOW
    if not positions or positions >= context_window:
        return context_window
    _log.warning(
        "context_window %d is more than the model's %d positions; using those",
        context_window,
        positions,
    )
    return positions
