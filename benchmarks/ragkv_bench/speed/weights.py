"""A model with torchao's weight-only quantisation."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ragkv.errors import MissingDependencyError
from ragkv.model.load import pretrained

Weights = Literal["int8", "int4"]
_GROUP = 32
"""Weights of an int4 group."""


def quantised_model(
    name: str | None, weights: Weights, *, dtype: torch.dtype | None, device: str | None
) -> tuple[PreTrainedModel, Any]:
    """Load a model as a user does who has torchao; return it and its tokenizer.

    Parameters
    ----------
    name
        Hub name or folder; None is the embedded default.
    dtype
        Of activations, and so of keys and values; None is the dtype of the model's files.

    Raises
    ------
    MissingDependencyError
        torchao is not installed.
    ModelNotFoundError
        There is no such model.
    """
    try:
        from torchao import quantization as torchao
        from transformers import TorchAoConfig
    except ImportError as error:
        raise MissingDependencyError("--weights needs torchao: pip install torchao") from error
    if weights == "int8":
        config = torchao.Int8WeightOnlyConfig()
    else:
        groups = torchao.PerGroup(_GROUP)
        kind: Any = torch
        config = torchao.IntxWeightOnlyConfig(weight_dtype=kind.int4, granularity=groups)
    model = pretrained(
        AutoModelForCausalLM,
        name,
        dtype="auto" if dtype is None else dtype,
        quantization_config=TorchAoConfig(config),
        device_map=device or "cpu",
    )
    return model.eval(), pretrained(AutoTokenizer, name)
