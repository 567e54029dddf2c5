"""Sampling settings as the fields of a request to vLLM."""

from __future__ import annotations

from typing import Any

from ragkv.config import DecodeConfig
from ragkv.config.decode import SchemaOrCall
from ragkv.config.generation import PASSED_ON, SAMPLING
from ragkv.config.json_schema import resolved
from ragkv.decode.generate import generation_config, within_max_length
from ragkv.errors import ConfigError
from ragkv.model.architecture import config_of
from ragkv.model.loaded import LoadedModel

_NAMES = {name: name for name in ("repetition_penalty", "min_p")} | {"min_new_tokens": "min_tokens"}


def fields_of(loaded: LoadedModel, decode: DecodeConfig) -> dict[str, Any]:
    """Return the fields of ``/v1/completions``, none left to vLLM's defaults.

    Raises
    ------
    ConfigError
        vLLM does not support a setting.
    """
    settings = generation_config(loaded, within_max_length(loaded, decode, 0))
    sampling = decode.temperature > 0
    given = {name: getattr(settings, name, None) for name in PASSED_ON}
    used = {
        name: value
        for name, value in given.items()
        if value is not None
        and value != []
        and value != (1 if isinstance(value, float) else 0)  # without effect
        and (sampling or name not in SAMPLING)
    }
    lacks = sorted(used.keys() - _NAMES)
    if decode.sparse != "off":
        lacks.append("sparse")
    if isinstance(decode, SchemaOrCall):
        lacks.append("a JSON schema beside optional tools")
    if lacks:
        raise ConfigError(f"vLLM, which decodes here, does not support {', '.join(lacks)}: omit it")
    known = config_of(loaded.model).vocab_size
    out = {_NAMES[name]: value for name, value in used.items()} | {
        "temperature": decode.temperature,
        "top_p": max(decode.top_p, 1e-6) if sampling else 1.0,
        "top_k": decode.top_k if sampling else 0,
        "stop_token_ids": [token for token in settings.eos_token_id or () if token < known],
        "ignore_eos": decode.ignore_eos,
    }
    if decode.seed is not None:
        out["seed"] = decode.seed
    if decode.logprobs is not None:
        out |= {"logprobs": decode.logprobs, "return_tokens_as_token_ids": True}
    if decode.json_schema is not None:
        schema = resolved(decode.json_schema).schema
        out["structured_outputs"] = {"json": schema, "disable_any_whitespace": True}
    return out
