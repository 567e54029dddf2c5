"""Decoders in this process: libraries of other packages."""

from __future__ import annotations

from collections.abc import Callable

from ragkv.engine.extensions import extension
from ragkv.engine.plan import StepDecoder
from ragkv.errors import ConfigError
from ragkv.model.default_model import DEFAULT_MODEL, default_model_gguf
from ragkv.model.gguf import gguf_file
from ragkv.model.loaded import LoadedModel, require_reusable


def local_decoder(decoder: object) -> Callable[[LoadedModel], StepDecoder | None]:
    """Return what opens a library over a model from a GGUF file; it gives None unless named.

    It raises ConfigError for a model from elsewhere, and the library's own errors.

    Raises
    ------
    ConfigError
        There is no library of this name.
    MissingDependencyError
        Its package is not installed or cannot be loaded.
    """
    if not isinstance(decoder, str):
        return lambda _: None
    if decoder != "llama.cpp":
        raise ConfigError(f"decoder must be 'llama.cpp' or an object, not {decoder!r}")
    open_library = extension("llamacpp", "ragkv-llamacpp")

    def open_over(loaded: LoadedModel) -> StepDecoder:
        is_default = loaded.name == DEFAULT_MODEL
        file = default_model_gguf() if is_default else gguf_file(loaded.name)
        if file is None:
            raise ConfigError(f"decoder='llama.cpp' needs a GGUF file, which {loaded.name} is not")
        found: StepDecoder = open_library(require_reusable(loaded), file)
        return found

    return open_over
