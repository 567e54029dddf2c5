"""Fingerprints: digests of everything that a chunk's cache depends on."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from operator import itemgetter
from typing import Any, Self

import torch
from blake3 import blake3
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ragkv.errors import UnsupportedModelError
from ragkv.model.architecture import backbone_of, config_of
from ragkv.model.modules import modules_of, parameters_of
from ragkv.model.rotary import RopeKind
from ragkv.model.samples import checksum_of
from ragkv.model.workspace import on_host

_WITHOUT_INFLUENCE = frozenset(
    {
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "quantization_config",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Configuration fields that do not affect keys and values, or are hashed elsewhere."""
_ADAPTER_FIELDS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
_SWITCHED = ("longrope", "dynamic")
_HASHED_AT_ONCE = 1 << 28
_PROCESS = os.getpid()
_NO_WEIGHTS = ("builtins", "torch", "transformers", "accelerate", "peft", "bitsandbytes")
"""Packages whose objects in a quantised model contain no unnamed weights."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that determines a chunk's KV.

    Attributes
    ----------
    weights
        Digest of all parameters and buffers, including adapters, their use, and quantisation.
    tokenizer
        Digest of the tokenizer's full definition.
    attention
        Digest of the model's configuration (all fields except those known to have no effect) and
        of the rotary frequencies' precision.
    dtype
        The dtype of keys and values, such as ``float32``.
    sink
        Digest of the sink's token ids.
    codec
        The codec of stored tensors.
    """

    weights: str
    tokenizer: str
    attention: str
    dtype: str
    sink: str = ""
    codec: str = "raw"

    def with_sink(self, token_ids: list[int]) -> Self:
        """Return the fingerprint of chunks encoded behind the given sink."""
        return replace(self, sink=digest_of(token_ids))

    def behind(self, texts: Sequence[str]) -> Self:
        """Return the fingerprint of a chunk's rows behind the sink and other chunks."""
        return replace(self, sink=digest_of([self.sink, *texts]))

    def with_codec(self, codec: str) -> Self:
        """Return the fingerprint of chunks stored in the given codec."""
        return replace(self, codec=codec)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits over all fields."""
        return digest_of(asdict(self))


def digest_of(value: object) -> str:
    """Return 32 hexadecimal digits of a JSON-ready value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake3(text.encode()).hexdigest(length=16)


def fingerprint_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kinds: Sequence[RopeKind] = (),
) -> Fingerprint:
    """Return the fingerprint of a loaded model, without a sink.

    ``kinds`` are the rotations of its layers, which entries depend on since keys are unrotated.
    """
    config = json.loads(config_of(model).to_json_string(use_diff=False))
    attention = {
        name: value
        for name, value in config.items()
        if value is not None and name not in _WITHOUT_INFLUENCE and not name.startswith("_")
    }
    rotary = backbone_of(model).rotary_emb
    expected = _configured_buffers(rotary)
    attention["rotary"] = [
        f"{name} {_precision(buffer)}{_deviation(buffer, expected.get(name))}"
        for name, buffer in sorted(rotary.named_buffers())
    ]
    turns = [kind.turn for kind in kinds]
    if set(turns) - {"halves"}:
        attention["turns"] = turns
    return Fingerprint(
        weights=_weights_digest(model),
        tokenizer=blake3(_definition(tokenizer).encode()).hexdigest(length=16),
        attention=digest_of(attention),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _precision(buffer: torch.Tensor) -> str:
    """Return the narrowest dtype that represents the numbers.

    ``model.to(bfloat16)`` rounds them, loading in a dtype does not. The numbers follow from the
    configuration, but can differ in the last bit between devices.
    """
    for narrow in (torch.bfloat16, torch.float16):
        if torch.equal(buffer.to(narrow).to(buffer.dtype), buffer):
            return str(narrow)
    return str(buffer.dtype)


def _configured_buffers(rotary: Any) -> dict[str, torch.Tensor]:
    """Return the buffers of a new rotary module of the same configuration; empty if unknown."""
    config = getattr(rotary, "config", None)
    if config is None or _is_switched(config):
        return {}
    try:
        with torch.device("cpu"):
            return dict(type(rotary)(config).named_buffers())
    except Exception:  # noqa: BLE001  a model's own code
        return {}


def _is_switched(config: PretrainedConfig) -> bool:
    """Whether the model changes its rotary table from prompt to prompt."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") in _SWITCHED


def _deviation(buffer: torch.Tensor, expected: torch.Tensor | None) -> str:
    """Return a digest of numbers that differ from the configuration's by more than rounding."""
    if expected is None or expected.shape != buffer.shape:
        return ""
    numbers = buffer.detach().double().cpu()
    if torch.allclose(numbers, expected.double(), rtol=2e-2, atol=0):  # bfloat16 rounds to 2**-8
        return ""
    return f" {blake3(numbers.numpy().tobytes()).hexdigest(length=8)}"


def _definition(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a tokenizer's definition without padding and truncation, which calls can set."""
    raw = tokenizer.backend_tokenizer
    if raw.padding is not None or raw.truncation is not None:
        raw = copy.deepcopy(raw)
        raw.no_padding()
        raw.no_truncation()
    return str(raw.to_str())


def state_of(model: PreTrainedModel) -> tuple[object, ...]:
    """Return a state that changes when weights or active adapters are changed in place.

    It takes about a millisecond. Samples of each weight (:mod:`ragkv.model.samples`) show writes
    through a parameter's ``data``, except those to a few rows of a large weight.
    """
    hidden = (tensor for _, tensor in _hidden(model))
    rotary = backbone_of(model).rotary_emb
    tables = () if _is_switched(config_of(model)) else rotary.buffers()
    weights = (*parameters_of(modules_of(model)), *hidden, *tables)
    parts = tuple(
        (part.data_ptr(), 0 if part.is_inference() else part._version, part.dtype)  # noqa: SLF001
        for part in weights
    )
    return *parts, checksum_of(model, weights, parts), id(rotary), *adapters_of(model)


def _hidden(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a quantised model's weights outside its parameters, such as MXFP4's experts (gpt-oss).

    The quantiser replaces them by objects of another package, with scales in attributes.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not attribute.startswith("_"):
                yield from _tensors_in(value, f"{name}.{attribute}")


def _tensors_in(value: object, name: str, depth: int = 5) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    inner: Mapping[Any, object] = {}
    if isinstance(value, Mapping):
        inner = value
    elif isinstance(value, list | tuple):
        inner = dict(enumerate(value))
    elif type(value).__module__.split(".")[0] in _NO_WEIGHTS or isinstance(value, torch.nn.Module):
        return
    elif is_dataclass(value) and not isinstance(value, type):
        inner = {field.name: getattr(value, field.name, None) for field in fields(value)}
    else:
        inner = getattr(value, "__dict__", {})
    for key, part in inner.items() if depth else ():
        yield from _tensors_in(part, f"{name}.{key}", depth - 1)


def adapters_of(model: PreTrainedModel) -> list[str]:
    """Return PEFT's active adapters with their scaling, layer by layer."""
    if not hasattr(model, "peft_config"):
        return []
    return [
        f"{name} {[getattr(layer, field, None) for field in _ADAPTER_FIELDS]};"
        for name, layer in model.named_modules()
        if hasattr(layer, "merged_adapters")
    ]


def hash_threads() -> int:
    """Return blake3's ``max_threads``: 1 after a fork, where its thread pool is dead."""
    return blake3.AUTO if os.getpid() == _PROCESS else 1


def _weights_digest(model: PreTrainedModel) -> str:
    """Hash the active adapters and the name, shape, dtype and bytes of every weight and buffer."""
    hasher = blake3(max_threads=hash_threads())
    hasher.update("".join(adapters_of(model)).encode())
    for name, tensor in sorted((*model.state_dict().items(), *_hidden(model)), key=itemgetter(0)):
        if isinstance(tensor, torch.Tensor):
            hasher.update(f"{name} {list(tensor.shape)} {tensor.dtype};".encode())
            for part in _bytes_of(tensor, name):
                hasher.update(part)
    return hasher.hexdigest(length=16)


def _bytes_of(tensor: torch.Tensor, name: str) -> Iterator[memoryview | bytes]:
    """Yield the bytes of a weight, or of the weights inside a wrapper such as torchao's."""
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is not None:
        for part in parts()[0]:
            inner = getattr(tensor, part)
            yield f"{type(tensor).__name__}.{part} {list(inner.shape)} {inner.dtype};".encode()
            yield from _bytes_of(inner, f"{name}.{part}")
        return
    try:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for part in torch.split(raw, _HASHED_AT_ONCE):
            yield on_host(part).numpy().data
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            raise
        raise UnsupportedModelError(
            f"The weight {name} is a {type(tensor).__name__}, whose bytes cannot be read to "
            f"identify this model ({error}). Load it with on_unsupported='full' to serve it by "
            "ordinary full prefill."
        ) from error
