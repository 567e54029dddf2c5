"""Models that are made for a benchmark: random weights of a public shape, or quantised ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ragkv.errors import ConfigError, MissingDependencyError
from ragkv.model.default_model import default_model_folder
from ragkv.model.load import check_device, pretrained

_GROUP = 32
"""Weights of an int4 group."""
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)


def _shape(kind: str, sizes: tuple[int, ...], theta: float, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta}
    values = {"tie_word_embeddings": False, "rope_parameters": rope}
    return {"model_type": kind, **dict(zip(_SIZES, sizes, strict=True)), **values, **more}


_LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES = {
    "qwen2.5-0.5b": _shape(
        "qwen2", (151936, 896, 4864, 24, 14, 2, 32768), 1e6, tie_word_embeddings=True
    ),
    "qwen2.5-7b": _shape("qwen2", (152064, 3584, 18944, 28, 28, 4, 32768), 1e6),
    "qwen2.5-14b": _shape("qwen2", (152064, 5120, 13824, 48, 40, 8, 32768), 1e6),
    "llama-3-8b": _shape("llama", (128256, 4096, 14336, 32, 32, 8, 8192), 5e5, rms_norm_eps=1e-5),
    "llama-3.1-8b": _shape(
        "llama",
        (128256, 4096, 14336, 32, 32, 8, 131072),
        5e5,
        rms_norm_eps=1e-5,
        rope_parameters=_LLAMA_31_ROPE,
    ),
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

    ``shape`` is a name of :data:`SHAPES`, a ``config.json``, or a folder that holds one, whose
    tokenizer is used where it has one, else the embedded model's. Without ``dtype`` it is bfloat16
    on a GPU and float32 elsewhere.

    Raises
    ------
    ConfigError
        There is no such shape, its vocabulary is smaller than the tokenizer's, or the device
        cannot be used.
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
        return AutoConfig.for_model(**SHAPES[shape]), None
    path = Path(shape)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no shape {shape!r}: give a folder with a config.json, that file, or one of "
            f"{', '.join(SHAPES)}"
        ) from error
    return config, path if path.is_dir() else path.parent


def quantised_model(
    name: str | None,
    weights: Literal["int8", "int4"],
    *,
    dtype: torch.dtype | None,
    device: str | None,
) -> tuple[PreTrainedModel, Any]:
    """Load a model as a user does who has torchao; return it and its tokenizer.

    ``dtype`` is of activations, and so of keys and values; None is that of the model's files.
    Raises MissingDependencyError without torchao.
    """
    try:
        from torchao import quantization as torchao
        from transformers import TorchAoConfig
    except ImportError as error:
        raise MissingDependencyError("--weights needs torchao: pip install torchao") from error
    if weights == "int8":
        config = torchao.Int8WeightOnlyConfig()
    else:
        groups, kind = torchao.PerGroup(_GROUP), getattr(torch, weights)
        config = torchao.IntxWeightOnlyConfig(weight_dtype=kind, granularity=groups)
    model = pretrained(
        AutoModelForCausalLM,
        name,
        dtype="auto" if dtype is None else dtype,
        quantization_config=TorchAoConfig(config),
        device_map=device or "cpu",
    )
    return model.eval(), pretrained(AutoTokenizer, name)
