"""Which of transformers' language models ragkv can reuse: `python tests/exactness/families.py [TYPE …]`.

Each is made tiny and random. A line says whether it was refused, and why, or that ratio 1, one
chunk behind the sink, and drawn tokens are what the model itself gives. docs/models.md has the
outcome.
"""

import logging
import sys
import warnings
from typing import Any

import torch
from exact import assert_exact
from tiny import SIZE, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ragkv import RagKV
from ragkv.errors import UnsupportedModelError

MORE = {
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
LARGEST = 50_000_000
"""Parameters: what is larger does not heed these sizes."""


def config_of(kind: str) -> PreTrainedConfig:
    config_class: Any = CONFIG_MAPPING[kind]
    usual = config_class()
    more = {name: size for name, size in MORE.items() if hasattr(usual, name)}
    if getattr(usual, "sliding_window", None):
        more["sliding_window"] = 48
    size = {name: value for name, value in SIZE.items() if hasattr(usual, name)}
    config: PreTrainedConfig = config_class(**{**size, **more})
    return config


def made(kind: str) -> PreTrainedModel:
    """A model with random weights, large enough that attention matters."""
    config = config_of(kind)
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.1)
            elif parameter.is_floating_point():  # norms and gates at 1 or 0 would hide themselves
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def outcome(kind: str) -> str:
    """One line about one model type."""
    try:
        model = made(kind)
    except Exception as error:  # noqa: BLE001  sizes that suit most do not suit all
        return f"not made: {type(error).__name__} {error}"
    try:
        with RagKV(model, tiny_tokenizer(), store=":memory:") as kv:
            turns = {kind.turn for kind in kv.loaded.architecture.rope_kinds}
            assert_exact(kv, in_deviations=1e-3)
    except UnsupportedModelError as error:
        return f"refused: {error}"
    except AssertionError as error:
        return f"WRONG: {error}"
    return f"reused, turns {', '.join(sorted(turns))}"


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for kind in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        sys.stdout.write(f"{kind}: {' '.join(outcome(kind).split())[:160]}\n")
        sys.stdout.flush()
