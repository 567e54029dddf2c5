"""A transformers pipeline's settings as the engine's arguments."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import Pipeline
from transformers.pipelines.text_generation import ReturnType

from ragkv.config import engine_arguments
from ragkv.errors import ConfigError

_DECODING = ("skip_special_tokens", "clean_up_tokenization_spaces")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """A text-generation pipeline's settings, from its construction and for one call.

    Attributes
    ----------
    arguments
        The engine's. Texts of ``stop`` end the answer *and are part of it*, as in transformers.
    full_text
        Whether the prompt is part of the text that is returned.
    decoding
        Keyword arguments of the tokenizer's ``decode``.
    unsupported
        Names of settings that the engine does not support.
    """

    arguments: dict[str, Any]
    full_text: bool
    decoding: dict[str, Any]
    unsupported: tuple[str, ...]

    @property
    def max_length(self) -> int | None:
        """Most tokens of prompt and answer, where that was set."""
        length: int | None = self.arguments.get("generation", {}).get("max_length")
        return length

    def limited(self, max_new_tokens: int | None) -> dict[str, Any]:
        """Return the arguments; an answer's limit comes before ``max_length``, as there."""
        if max_new_tokens is None:
            return self.arguments
        rest = dict(self.arguments.get("generation", {}))
        rest.pop("max_length", None)
        return {**self.arguments, "max_new_tokens": max_new_tokens, "generation": rest}

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
    if wanted.get("cache_implementation") == "static":
        _say_own_cache()
    arguments, refused = engine_arguments(wanted, pipeline.model.generation_config)
    unsupported = [*refused, *(name for name in before if name not in wanted | forward)]
    unsupported += [name for name in after if name not in (*_DECODING, "return_type")]
    if after.get("return_type") is ReturnType.TENSORS:
        unsupported.append("return_tensors")
    most = arguments.get("generation", {}).get("max_length")
    return PipelineSettings(
        arguments=arguments if most is None else {"max_new_tokens": most, **arguments},
        full_text=after.get("return_type", ReturnType.FULL_TEXT) is ReturnType.FULL_TEXT,
        decoding={name: after[name] for name in _DECODING if name in after},
        unsupported=tuple(sorted(set(unsupported))),
    )


@cache
def _say_own_cache() -> None:
    _log.warning("the pipeline's cache_implementation='static': ragkv decodes over its own cache")
