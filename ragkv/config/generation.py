"""transformers' generation settings: supported ones, and ones without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragkv.config.checks import check_known, check_number, check_whole
from ragkv.errors import ConfigError

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff"),
)
"""Settings that only affect sampling."""

_RANGES = {
    "repetition_penalty": (1e-3, 1e3),
    "min_p": (0.0, 1.0),
    "top_h": (1e-6, 1.0),
    "typical_p": (1e-6, 1.0),
    "epsilon_cutoff": (0.0, 1.0),
    "eta_cutoff": (0.0, 1.0),
}
_COUNTS = ("no_repeat_ngram_size", "min_new_tokens", "max_length")
_TOKENS = ("suppress_tokens", "begin_suppress_tokens")
PASSED_ON = (*_RANGES, *_COUNTS, *_TOKENS, "bad_words_ids")
"""Settings of transformers' logits processors, and ``max_length``, which ragkv applies."""

_ENGINE = ("max_new_tokens", "prompt_lookup_num_tokens", "do_sample")
_ENDS = ("eos_token_id", "stop_strings")
_TAKEN = frozenset({*PASSED_ON, *SAMPLING, *_ENGINE, *_ENDS})

_UNUSED = (
    *("pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version"),
    *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
    *("compile_config", "disable_compile", "continuous_batching_config", "max_matching_ngram_size"),
    *("renormalize_logits", "remove_invalid_values", "_from_model_config", "_commit_hash"),
    "synced_gpus",
    # of beams, and of assistant models
    *("early_stopping", "length_penalty", "diversity_penalty"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "speculation_type"),
)
"""Settings that do not affect answers, whatever their value."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "cache_implementation": ("dynamic", "static"),
    "guidance_scale": (1,),
    "min_length": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "penalty_alpha": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ({}, []),
    "constraints": ([],),
    "force_words_ids": ([],),
    "watermarking_config": (),
    "dola_layers": (),
    "assistant_early_exit": (),
    "max_time": (),
    "token_healing": (False,),
    "use_mtp": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "return_dict_in_generate": (False,),
}
"""Unsupported settings, with their values without effect (besides None)."""

_RESET = ("num_beams", "num_return_sequences", "penalty_alpha", "dola_layers", "constraints")
"""Unsupported settings whose value in the model's configuration is ignored."""

GENERATION = _TAKEN | {*_UNUSED, *_NEUTRAL}
"""All of transformers' names."""


def check_generation(given: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """Return the settings of transformers' logits processors, with the types that they expect.

    Parameters
    ----------
    max_new_tokens
        Most tokens of the answer.

    Raises
    ------
    ConfigError
        A setting is unknown or invalid.
    """
    out: dict[str, Any] = {}
    for name, value in given.items():
        if name not in PASSED_ON:
            refuse_unsupported({name: value})
            raise ConfigError(f"generation: {name} is a separate argument")
        if value is None or value == []:
            continue
        if name in _RANGES:
            check_number(name, value, *_RANGES[name])
            out[name] = float(value)
        elif name in _COUNTS:
            check_whole(name, value, name == "max_length", 2**31)
            out[name] = value
        else:
            out[name] = _ids(name, value)
    if (least := out.get("min_new_tokens", 0)) > max_new_tokens:
        raise ConfigError(f"min_new_tokens {least} is more than max_new_tokens {max_new_tokens}")
    return out


def _ids(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list, not {value!r}")
    if name == "bad_words_ids":
        if not all(value):
            raise ConfigError("bad_words_ids: a word needs a token")
        return [_ids(f"a word of {name}", word) for word in value]
    for token in value:
        check_whole(f"a token of {name}", token, 0, 2**31)
    return list(value)


def engine_arguments(
    given: Mapping[str, Any], own: Any
) -> tuple[dict[str, Any], dict[str, object]]:
    """Return transformers' generation settings as the engine's arguments.

    As in transformers, sampling settings have no effect without ``do_sample``, ``max_new_tokens``
    takes precedence over ``max_length``, and ``eos_token_id`` replaces the model's own.

    Parameters
    ----------
    given
        Settings by their names in ``GenerationConfig``; None is ignored.
    own
        The model's ``generation_config``, or None.

    Returns
    -------
    tuple
        Arguments of :meth:`ragkv.RagKV.generate`, and the unsupported settings by name.
    """
    given = {name: value for name, value in given.items() if value is not None}
    sampling = bool(given.get("do_sample", getattr(own, "do_sample", False)))
    out: dict[str, Any] = {"temperature": 0.0}
    for name, usual in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 50)) if sampling else ():
        value = given.get(name, getattr(own, name, None))
        out[name] = usual if value is None else value
    if "max_new_tokens" in given:
        out["max_new_tokens"] = given["max_new_tokens"]
    if "prompt_lookup_num_tokens" in given:
        check_whole("prompt_lookup_num_tokens", given["prompt_lookup_num_tokens"], 0, 2**31)
        out["drafts"] = given["prompt_lookup_num_tokens"] > 0
    passed = {name: given[name] for name in PASSED_ON if name in given}
    if "max_new_tokens" in given:
        passed.pop("max_length", None)
    if not sampling:
        passed = {name: value for name, value in passed.items() if name not in SAMPLING}
    if passed:
        out["generation"] = passed
    if (stop := given.get("stop_strings")) is not None:
        out["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "eos_token_id" in given and given["eos_token_id"] != getattr(own, "eos_token_id", None):
        ends = given["eos_token_id"]
        ends = [ends] if isinstance(ends, int) else list(ends)
        out |= {"ignore_eos": True, "stop_token_ids": [token for token in ends if token >= 0]}
    known = _TAKEN | {*_UNUSED}
    unsupported = {
        name: value
        for name, value in given.items()
        if name not in known and not _is_neutral(name, value, own)
    }
    return out, unsupported


def _is_neutral(name: str, value: object, own: Any) -> bool:
    if name not in _NEUTRAL:
        return False
    usual = None if name in _RESET else getattr(own, name, None)
    return value == usual if usual is not None else value in _NEUTRAL[name]


def refuse_unsupported(unsupported: Mapping[str, object], *, others: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for settings that the engine does not support.

    ``others`` are further names for the hint.
    """
    for name in unsupported.keys() & _NEUTRAL.keys():
        usual = _NEUTRAL[name]
        instead = f"omit it{f', or give {usual[0]!r}' if usual else ''}"
        raise ConfigError(f"ragkv does not support {name}={unsupported[name]!r}: {instead}")
    check_known("generation setting", unsupported, _TAKEN, others)
