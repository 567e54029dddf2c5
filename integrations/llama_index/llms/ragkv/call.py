"""From HuggingFaceLLM's and LlamaIndex's keyword arguments to the engine's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ragkv import RagKV
from ragkv.config import check_removed
from ragkv.errors import ConfigError
from ragkv.serve.client import RemoteRagKV

_log = logging.getLogger(__name__)
_DECODE = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "seed",
    "prompt_lookup_num_tokens",
    "json_schema",
)
_WITHOUT_EFFECT = {"use_cache": True, "num_beams": 1, "num_return_sequences": 1}
_SAMPLING_ONLY = ("top_k", "min_p", "typical_p")
_IGNORED = ("pad_token_id",)


def decode_arguments(
    generate_kwargs: Mapping[str, Any],
    call: Mapping[str, Any],
    *,
    max_new_tokens: int,
    generation_config: Any,
) -> dict[str, Any]:
    """Return the keyword arguments of ``RagKV.generate`` and ``stream``.

    As in transformers, ``do_sample`` (or the model's generation config) switches sampling on, and
    without it temperature and top_p have no effect. A ``temperature`` in the call itself takes
    precedence: 0 is greedy.

    Raises
    ------
    ConfigError
        An unsupported argument in ``generate_kwargs``.
    """
    call = dict(call)
    lengths = (call.pop("max_tokens", None), call.pop("max_new_tokens", None))
    for length in lengths:
        if length is not None:
            call.setdefault("max_new_tokens", length)
    given = {**generate_kwargs, **call}
    sampling = given.pop("do_sample", None)
    if "temperature" in call:
        sampling = bool(call["temperature"])
    if sampling is None:
        sampling = bool(getattr(generation_config, "do_sample", False))
    if sampling:
        for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 50)):
            default = getattr(generation_config, name, None)
            given.setdefault(name, neutral if default is None else default)
    else:
        given["temperature"] = 0.0
        for name in ("top_p", *_SAMPLING_ONLY):
            given.pop(name, None)
    _refuse_unknown(given, generate_kwargs)
    given["stop"] = _texts(given.get("stop"))
    if given.get("max_new_tokens") is None:
        given["max_new_tokens"] = max_new_tokens
    return given


def _refuse_unknown(given: dict[str, Any], generate_kwargs: Mapping[str, Any]) -> None:
    check_removed(generate_kwargs)
    for name in set(generate_kwargs) & set(given) - set(_DECODE):
        if name in _IGNORED or (
            name in _WITHOUT_EFFECT and given[name] in (None, _WITHOUT_EFFECT[name])
        ):
            del given[name]
        else:
            raise ConfigError(
                f"generate_kwargs: ragkv cannot honour {name}={given[name]!r}; it knows "
                f"do_sample, {', '.join(_DECODE)}"
            )


def _texts(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def generation_config_of(engine: RagKV | RemoteRagKV) -> Any:
    """Return the model's own settings of generation; of a server's model none are known."""
    if isinstance(engine, RemoteRagKV):
        return None
    return getattr(engine.model, "generation_config", None)


def clipped_window(context_window: int, engine: RagKV | RemoteRagKV) -> int:
    """Return the context window, at most the positions that the model knows."""
    known = engine if isinstance(engine, RemoteRagKV) else engine.loaded
    positions = known.positions
    if not positions or positions >= context_window:
        return context_window
    _log.warning(
        "context_window %d is more than the model's %d positions; using those",
        context_window,
        positions,
    )
    return positions
