"""GGUF files of tiny models, as llama.cpp's converter writes them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tiny import tiny_tokenizer
from transformers import PreTrainedModel

Change = Callable[[gguf.GGUFWriter], object]
CONTROL, NORMAL = 3, 1


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    quantised: bool = False,
    architecture: str | None = None,
    fields: Mapping[str, str | int | float] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    without: str | None = None,
) -> Path:
    """Write a model and the tiny tokenizer.

    Parameters
    ----------
    quantised
        Whether matrices are written in Q4_0.
    fields, tensors
        Further metadata and tensors, by name.
    without
        A tensor that is left out.
    """
    config = model.config
    kind = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture or kind)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for name, value in (fields or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](name, value)
    _add_tokenizer(writer)
    for name, tensor in {**_tensors(model, kind), **(tensors or {})}.items():
        if name == without:
            continue
        if quantised and tensor.ndim == 2:
            q4 = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, q4), raw_dtype=q4)
        else:
            writer.add_tensor(name, tensor)
    _close(writer)
    return path


def split(path: Path, parts: int) -> list[Path]:
    """Write the tensors of a file into several, as llama.cpp's gguf-split names them."""
    reader = gguf.GGUFReader(path)
    made = []
    for at in range(parts):
        part = path.with_name(f"{path.stem}-{at + 1:05}-of-{parts:05}.gguf")
        writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
        writer.add_uint16("split.no", at)
        writer.add_uint16("split.count", parts)
        for key, field in reader.fields.items() if at == 0 else ():
            if not key.startswith(("GGUF.", "general.architecture")):
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], inner)
        for each in reader.tensors[at::parts]:
            writer.add_tensor(each.name, each.data, raw_dtype=each.tensor_type)
        _close(writer)
        made.append(part)
    return made


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens) | {"<|im_start|>", "<|im_end|>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if each in special else NORMAL for each in tokens])
    writer.add_token_merges([" ".join(pair) for pair in raw["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(tokenizer.chat_template)


def _tensors(model: PreTrainedModel, kind: str) -> dict[str, np.ndarray[Any, Any]]:
    config = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    out = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = weight.float()
        if kind == "llama" and "q_proj" in name:
            tensor = _in_pairs(tensor, config.num_attention_heads)
        if kind == "llama" and "k_proj" in name:
            tensor = _in_pairs(tensor, config.num_key_value_heads)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        out[names.get_name(name, (".weight", ".bias"))] = tensor.numpy()
    return out


def _in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows in the order of llama.cpp, which rotates neighbours in place of halves."""
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
