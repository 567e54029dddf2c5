"""Models of public shapes with random weights, for what cannot be downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ragkv.errors import ConfigError
from ragkv.model.default_model import default_model_folder
from ragkv.model.load import check_device

_QWEN: dict[str, Any] = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "hidden_act": "silu"}
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _QWEN
    | {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_parameters": _QWEN_ROPE,
    },
    "qwen2.5-7b": _QWEN
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "rope_parameters": _QWEN_ROPE,
    },
    "qwen2.5-14b": _QWEN
    | {
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "rope_parameters": _QWEN_ROPE,
    },
    "llama-3-8b": _LLAMA
    | {
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    "llama-3.1-8b": _LLAMA
    | {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
"""The configurations' values, by name."""


def random_model(
    shape: str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make a model of a shape, weights drawn on the device; nothing is downloaded.

    Parameters
    ----------
    shape
        A name of :data:`SHAPES`, a ``config.json``, or a folder that holds one. A folder's
        tokenizer is used where it has one, else the embedded model's.
    dtype
        None is bfloat16 on a GPU and float32 elsewhere.

    Raises
    ------
    ConfigError
        There is no such shape, its vocabulary is smaller than the tokenizer's, or the device
        cannot be used.
    ModelNotFoundError
        The embedded model, whose tokenizer is needed, is not installed.
    """
    config, folder = _config(shape)
    name = shape if folder is None else folder.resolve().name
    with_tokenizer = folder is not None and (folder / "tokenizer.json").exists()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder if with_tokenizer else default_model_folder()
    )
    if config.vocab_size < len(tokenizer):
        raise ConfigError(
            f"{shape} has {config.vocab_size} words and the tokenizer {len(tokenizer)}: give a "
            "folder that holds the shape's own tokenizer"
        )
    check_device(device)
    where = torch.device(device)
    if dtype is None:
        dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    torch.manual_seed(seed)
    with where:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.config.name_or_path = f"{name} (random weights)"
    model.train(mode=False)
    return model, tokenizer


def _config(shape: str) -> tuple[PreTrainedConfig, Path | None]:
    """Return the configuration, and the folder that it was read from."""
    if shape in SHAPES:
        values = dict(SHAPES[shape])
        return AutoConfig.for_model(values.pop("model_type"), **values), None
    path = Path(shape)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no shape {shape!r}: give a folder with a config.json, that file, or one of "
            f"{', '.join(SHAPES)}"
        ) from error
    return config, path if path.is_dir() else path.parent
