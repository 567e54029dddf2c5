"""Tiny random models of every supported family, and a tokenizer: no download."""

import pydoc_data.topics
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 600
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
_LONGROPE_FACTORS = [1.0 + 0.1 * at for at in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": _LONGROPE_FACTORS,
    "long_factor": [4 * factor for factor in _LONGROPE_FACTORS],
    "original_max_position_embeddings": 256,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-llama3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "llama-linear": (LlamaConfig, {"rope_parameters": LINEAR}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralConfig, {"sliding_window": 48}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "sliding_window": 48,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "phi3": (Phi3Config, {"partial_rotary_factor": 0.5, "sliding_window": None}),
    "gemma2": (
        Gemma2Config,
        {"sliding_window": 48, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0},
    ),
    "gpt-oss": (
        GptOssConfig,
        {"sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
EAGER_ALONE = ("gemma2", "gpt-oss")
"""transformers' ``sdpa`` knows neither caps nor sinks of a model's own."""


def tiny_model(
    family: str = "llama", attention: str = "sdpa", seed: int = 0, layers: int | None = None
) -> PreTrainedModel:
    """Make a float32 model with random weights, large enough that attention matters."""
    config_class, changes = FAMILIES[family]
    config = config_class(**{**SIZE, **changes})
    if layers is not None:
        config.num_hidden_layers = layers
    attention = "eager" if family in EAGER_ALONE else attention
    return random_model(config, seed, attn_implementation=attention)


def saved(folder: Path | str, family: str = "llama", **how: Any) -> str:
    """Save a :func:`tiny_model` and the tokenizer; return the folder's name."""
    tiny_model(family, **how).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def random_model(config: PreTrainedConfig, seed: int = 0, **how: Any) -> PreTrainedModel:
    """Make a float32 model of that configuration, as :func:`tiny_model` does."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **how)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
            elif name.endswith("sinks"):
                parameter.normal_(3, 1)
    return model.eval()


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Train a small byte-level BPE on the Python language reference."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(
        [pydoc_data.topics.topics["if"], pydoc_data.topics.topics["for"]], trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|eos|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def some_chunks(count: int = 3, words: int = 40) -> list[str]:
    """Return different pieces of real text of about ``words`` words each."""
    text = pydoc_data.topics.topics["assignment"].split()
    return [" ".join(text[i * words : (i + 1) * words]) for i in range(count)]


UNEVEN = [some_chunks(4, words)[index] for index, words in enumerate((30, 15, 50, 22))]
"""Chunks of several lengths."""


def ask(chunks: list[str], question: str = "\n\nWhat now?") -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join(chunks) + question}]
