"""A transformers pipeline's settings as the engine's arguments."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import GenerationConfig, Pipeline
from transformers.pipelines.text_generation import ReturnType

from ragkv.errors import ConfigError

_ENGINE = {
    "max_new_tokens",
    "max_length",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "prompt_lookup_num_tokens",
}
_WITHOUT_EFFECT = {"pad_token_id", "bos_token_id", "use_cache", "transformers_version"}
_ONLY_WHEN_SAMPLING = {"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
_TOP_K = 50
"""transformers' default."""
_DECODING = ("skip_special_tokens", "clean_up_tokenization_spaces")
_NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "stop_strings": None,
}
_TAKEN = {"cache_implementation": "static"}
"""Settings that change no token: the engine has its own way."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """A text-generation pipeline's settings, from its construction and for one call.

    Attributes
    ----------
    max_new_tokens, max_length
        Limit of the answer; or of prompt and answer, where only that was set.
    full_text
        Whether the prompt is part of the text that is returned.
    stop_strings
        Texts that end the answer *and are part of it*, as in transformers.
    prompt_lookup_num_tokens
        Longest draft of prompt lookup decoding; None is ragkv's choice.
    decoding
        Keyword arguments of the tokenizer's ``decode``.
    unsupported
        Names of settings that the engine does not support.
    """

    max_new_tokens: int | None
    max_length: int | None
    temperature: float
    top_p: float
    top_k: int
    stop_strings: tuple[str, ...]
    full_text: bool
    decoding: dict[str, Any]
    prompt_lookup_num_tokens: int | None
    unsupported: tuple[str, ...]

    def answer_limit(self, prompt_tokens: int) -> int:
        """Return the number of tokens that may be generated after a prompt."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return max(1, (self.max_length or 0) - prompt_tokens)

    def check(self) -> None:
        """Raise ConfigError for a setting that the engine does not support."""
        if self.unsupported:
            raise ConfigError(
                f"ragkv does not support these settings of the pipeline: "
                f"{', '.join(self.unsupported)}. Omit them, or use on_unsupported='full' to serve "
                "such prompts by the ordinary pipeline."
            )


def read_settings(pipeline: Pipeline, call: dict[str, Any] | None = None) -> PipelineSettings:
    """Resolve the settings as the pipeline itself does for a call with ``call``.

    transformers 5.23: its defaults (256 tokens, sampling at 0.7), under the model's
    generation config, under the pipeline's arguments, under the call's.
    """
    sanitize: Any = pipeline._sanitize_parameters  # noqa: SLF001
    before, forward, after = sanitize(**(call or {}))
    before = pipeline._preprocess_params | before  # noqa: SLF001
    after = pipeline._postprocess_params | after  # noqa: SLF001
    forward = pipeline._prepare_generate_kwargs(pipeline._forward_params | forward)  # noqa: SLF001
    wanted = pipeline._get_set_generation_params(forward)  # noqa: SLF001
    for name in ("generation_config", "tokenizer"):
        wanted.pop(name, None)
    stop_strings = wanted.pop("stop_strings", None) or ()
    if wanted.get("cache_implementation") == "static":
        _say_own_cache()
    sampling = bool(wanted.get("do_sample"))
    unsupported = _unsupported(wanted, pipeline.model.generation_config, sampling=sampling)
    unsupported += [name for name in before if name not in wanted and name not in forward]
    unsupported += [name for name in after if name not in (*_DECODING, "return_type")]
    if after.get("return_type") is ReturnType.TENSORS:
        unsupported.append("return_tensors")
    return PipelineSettings(
        max_new_tokens=wanted.get("max_new_tokens"),
        max_length=wanted.get("max_length"),
        temperature=wanted.get("temperature") or 1.0 if sampling else 0.0,
        top_p=wanted.get("top_p") or 1.0 if sampling else 1.0,
        top_k=_top_k(wanted, pipeline.model.generation_config) if sampling else 0,
        stop_strings=(stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings),
        full_text=after.get("return_type", ReturnType.FULL_TEXT) is ReturnType.FULL_TEXT,
        decoding={name: after[name] for name in _DECODING if name in after},
        prompt_lookup_num_tokens=wanted.get("prompt_lookup_num_tokens"),
        unsupported=tuple(sorted(set(unsupported))),
    )


@cache
def _say_own_cache() -> None:
    _log.warning("the pipeline's cache_implementation='static': ragkv decodes over its own cache")


def _top_k(wanted: dict[str, Any], own: GenerationConfig) -> int:
    """Return top_k: the first of the settings that has one."""
    for value in (wanted.get("top_k"), getattr(own, "top_k", None), _TOP_K):
        if value is not None:
            return int(value)
    return 0


def _unsupported(wanted: dict[str, Any], own: GenerationConfig, *, sampling: bool) -> list[str]:
    """Return the settings that the engine would ignore: it starts from the model's own config."""
    ignored = _ENGINE | _WITHOUT_EFFECT | (set() if sampling else _ONLY_WHEN_SAMPLING)
    return [
        name
        for name, value in wanted.items()
        if name not in ignored
        and value != getattr(own, name, None)
        and value not in (_NEUTRAL.get(name), _TAKEN.get(name))
    ]
