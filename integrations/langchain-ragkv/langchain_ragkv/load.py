"""langchain_huggingface's keyword arguments as the fields of a model."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from ragkv import RagKV
from ragkv.config import PASSED_ON, engine_arguments
from ragkv.engine.settings import check_settings
from ragkv.errors import ConfigError
from ragkv.model.load import pretrained

_GENERATION = ("max_new_tokens", "do_sample")
_ENGINE = ("store", "device", "dtype")
_ENGINE_AND_MODEL = ("namespace", "on_unsupported")
_REUSE = ("recompute_ratio", "method")
_SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": 50}
"""Defaults of transformers' text-generation pipeline."""


def model_fields(
    model_id: str | None, task: str | None, backend: str, given: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a model by the arguments of ``from_model_id``, its engine among them.

    Raises
    ------
    ConfigError
        Another task or backend, an unsupported generation setting, or a device given twice.
    ModelNotFoundError
        There is no such model on this machine or the hub.
    """
    if task not in (None, "text-generation") or backend not in ("default", "pipeline"):
        raise ConfigError("Only task='text-generation' with backend='pipeline' can be served.")
    fields = dict(given)
    fields.pop("batch_size", None)  # each prompt is served by itself
    loading = dict(fields.pop("model_kwargs", None) or {})
    if (device_map := fields.pop("device_map", None)) is not None:
        if fields.get("device") is not None or "device_map" in loading:
            raise ConfigError("Give device_map once, and no device.")
        loading["device_map"] = device_map
    generation = dict(fields.pop("pipeline_kwargs", None) or {})
    generation |= {name: fields.pop(name) for name in _GENERATION if name in fields}
    sampling = bool(generation.get("do_sample"))
    given = {name: value for name, value in fields.items() if value is not None}
    fields = fields | decoding_fields(generation) | given
    if isinstance(fields.get("device"), int):
        fields["device"] = "cpu" if fields["device"] < 0 else f"cuda:{fields['device']}"
    fields["model_id"] = model_id
    if loading or sampling:
        reuse = {name: fields[name] for name in _REUSE if fields.get(name) is not None}
        own = {name: fields[name] for name in ("store", "namespace") if name in fields}
        check_settings(None, reuse, **own)
        engine = {name: fields[name] for name in _ENGINE_AND_MODEL if name in fields}
        engine |= {name: fields.pop(name) for name in _ENGINE if name in fields}
        model = pretrained(AutoModelForCausalLM, model_id, **loading)
        fields["kv"] = RagKV(model, pretrained(AutoTokenizer, model_id), **engine)
        if sampling:
            found = decoding_fields(generation, model.generation_config)
            fields |= {name: value for name, value in found.items() if name not in given}
    return fields


def decoding_fields(generation: dict[str, Any], own: Any = None) -> dict[str, Any]:
    """Return transformers' settings as a model's fields, as far as they are given.

    Parameters
    ----------
    own
        The model's ``generation_config``: where ``do_sample`` is true, what it and the pipeline
        sample with is taken, too.

    Raises
    ------
    ConfigError
        A setting is not supported.
    """
    rest = dict(generation)
    rest.pop("return_full_text", None)  # answers are without the prompt
    sampling = rest.pop("do_sample", None)
    names = {"max_new_tokens": "max_tokens"} | {
        name: name for name in (*_SAMPLING, "prompt_lookup_num_tokens")
    }
    out = {field: rest.pop(name) for name, field in names.items() if name in rest}
    found, refused = engine_arguments({**rest, "do_sample": True}, None)
    if found.get("ignore_eos"):
        refused["eos_token_id"] = rest["eos_token_id"]
    if refused:
        raise ConfigError(
            f"These settings are not supported: {', '.join(sorted(refused))}. There are "
            f"max_new_tokens, do_sample, temperature, top_p, top_k, {', '.join(PASSED_ON)}."
        )
    if sampling:
        for name, usual in _SAMPLING.items():
            value = getattr(own, name, None)
            out.setdefault(name, usual if value is None else value)
    elif sampling is False:
        out["temperature"] = 0.0
    return out | {name: found[name] for name in ("generation", "stop") if name in found}
