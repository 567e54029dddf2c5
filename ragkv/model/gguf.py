"""GGUF files: a model in one file, converted once into a folder for transformers."""

from __future__ import annotations

import copy
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from blake3 import blake3
from gguf import GGUFReader, GGUFWriter
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ragkv.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from ragkv.model.fingerprint import hash_threads
from ragkv.model.folders import cache_folder, expanded
from ragkv.model.memory import is_out_of_memory

_log = logging.getLogger(__name__)
CACHE = "RAGKV_GGUF_CACHE"
"""Environment variable: ``off`` loads each file without writing a folder."""
_MAGIC = b"GGUF"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rotary scaling of Llama 3.1 to 3.3, of which files contain only the resulting factors."""
_SCALINGS = {
    "none": set[str](),
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
"""Kinds of rotary scaling, with their parameters as transformers names them."""
_RENAMED = {"original_context_length": "original_max_position_embeddings"}


def gguf_file(name: str | Path) -> Path | None:
    """Return the path of a GGUF file; None for a folder or a hub name.

    Files without the suffix, such as Ollama's blobs, are recognised by their first bytes.

    Raises
    ------
    ModelNotFoundError
        The name ends in ``.gguf``, and there is no such file, or it is not a GGUF file.
    """
    path = expanded(name)
    is_named = path.suffix.lower() == ".gguf"
    if not path.is_file():
        if is_named:
            raise ModelNotFoundError(f"There is no file {path}")
        return None
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            return path
    if is_named:
        raise ModelNotFoundError(f"{path} is not a GGUF file: its first bytes are not 'GGUF'")
    return None


def from_gguf(auto: Any, path: Path, **kwargs: Any) -> Any:
    """Load a file by a transformers ``Auto…`` class.

    It is loaded from its folder in the cache. If that is turned off or cannot be written, it is
    dequantised each time. A configuration is read from the file.

    Raises
    ------
    ModelNotFoundError, UnsupportedModelError
        As :func:`converted`.
    """
    dtype = torch.float32
    if auto is AutoModelForCausalLM:
        dtype = kwargs.setdefault("dtype", dtype)
    if auto is not AutoConfig and os.environ.get(CACHE) != "off":
        reader = PreTrainedTokenizerFast if auto is AutoTokenizer else auto
        try:
            return reader.from_pretrained(str(converted(path, dtype)), **kwargs)
        except CacheNotWritableError as error:
            _log.info("%s", error)
    with _in_one_file(path) as whole:
        return _unpacked(auto, whole, **kwargs)


class CacheNotWritableError(ModelNotFoundError):
    """The folder of a converted file cannot be written."""


def converted(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Return the folder of a converted file, for transformers and other programs.

    On first use the file is dequantised into the user's cache folder as safetensors. The folder's
    name contains a digest of the file. Several processes can do so at the same time.

    Raises
    ------
    ModelNotFoundError
        The file is damaged, a part of it is missing, or the cache folder cannot be written.
    UnsupportedModelError
        It does not contain a language model of a type that transformers reads.
    """
    stats = [(part, part.stat()) for part in parts_of(path)]
    digest = _digest(tuple((part, stat.st_size, stat.st_mtime_ns) for part, stat in stats))
    name = f"{path.stem}-{digest}-{str(dtype).removeprefix('torch.')}"
    try:
        target = cache_folder() / "models" / name
        if not (target / "config.json").exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _convert(path, target, dtype)
    except (OSError, ConfigError, SafetensorError) as error:
        raise CacheNotWritableError(
            f"{path} cannot be unpacked into the cache folder: {error}. Set XDG_CACHE_HOME to a "
            "writable folder."
        ) from error
    return target


@cache
def _digest(parts: tuple[tuple[Path, int, int], ...]) -> str:
    """Return a digest of files, given with size and time: model and tokenizer need the same."""
    hasher = blake3(max_threads=hash_threads())
    for part, _, _ in parts:
        hasher.update_mmap(part)
    return hasher.hexdigest(length=8)


def _convert(path: Path, target: Path, dtype: torch.dtype) -> None:
    with (
        tempfile.TemporaryDirectory(prefix=".converting-", dir=target.parent) as unfinished,
        _in_one_file(path, target.parent) as whole,
    ):
        folder = Path(unfinished) / "model"
        model = _unpacked(AutoModelForCausalLM, whole, dtype=dtype)
        size = sum(each.nbytes for each in model.parameters())
        _log.warning("converting %s once into %s (%.1f GB)", path, target, size / 1e9)
        model.save_pretrained(folder)
        _unpacked(AutoTokenizer, whole).save_pretrained(folder)
        try:
            folder.replace(target)
        except OSError:
            if not (target / "config.json").exists():
                raise


def _unpacked(auto: Any, path: Path, **kwargs: Any) -> Any:
    """Load one whole file by a transformers ``Auto…`` class."""
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": path.parent,
        "gguf_file": path.name,
    }
    try:
        if auto is AutoTokenizer:
            return _as_in_file(auto.from_pretrained(**place, **kwargs))
        config = AutoConfig.from_pretrained(**place)
        reader = GGUFReader(path)
        head_dim = reader.fields.get(f"{config.model_type}.attention.key_length")
        if head_dim is not None:
            config.head_dim = head_dim.contents()
        _scale_rope(config, reader)
        if auto is AutoConfig:
            return config
        model, info = auto.from_pretrained(
            **place, **kwargs, config=config, output_loading_info=True
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _refusal(path, error) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelNotFoundError(f"{path} lacks weights of its model: {', '.join(missing[:4])}")
    model.config.__dict__.pop("quantization_config", None)
    vars(model)["hf_quantizer"] = None
    return model


def _as_in_file(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Return the tokenizer as a class that reads it from a folder unchanged.

    A model type's own class has its own normaliser and pre-tokeniser, whatever the file names.
    """
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **tokenizer.special_tokens_map,
    )


def _refusal(path: Path, error: Exception) -> ModelNotFoundError | UnsupportedModelError:
    try:
        architecture = GGUFReader(path).fields["general.architecture"].contents()
    except Exception as damage:  # noqa: BLE001
        return ModelNotFoundError(f"{path} is damaged or incomplete: {damage!r}")
    return UnsupportedModelError(
        f"{path} has the architecture {architecture!r}, which transformers "
        f"{transformers.__version__} cannot load as a language model: {error}"
    )


# ---- rotary scaling, which transformers does not read


def _scale_rope(config: PreTrainedConfig, reader: GGUFReader) -> None:
    """Set a file's rotary scaling; ValueError for an unknown kind."""
    own = config.rope_parameters.get("full_attention", config.rope_parameters)
    if own.get("rope_type", "default") != "default":
        return
    given = {}
    for key, field in reader.fields.items():
        _, found, name = key.partition(".rope.scaling.")
        if found and name != "finetuned":
            given[_RENAMED.get(name, name)] = field.contents()
    kind = given.pop("type", "none")
    tensors = {each.name: each.data for each in reader.tensors if each.name.startswith("rope_f")}
    if list(tensors) == ["rope_freqs.weight"]:
        own.update(_llama3(config, own["rope_theta"], tensors["rope_freqs.weight"]))
    elif tensors or given.keys() != _SCALINGS.get(kind, ()):
        raise ValueError(f"rotary scaling {kind!r} with {sorted({*given, *tensors})} is unknown")
    elif kind != "none":
        own.update(given, rope_type=kind)


def _llama3(config: PreTrainedConfig, theta: float, factors: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the parameters of the scaling with these factors, ``[head_dim / 2]`` float32."""
    found = _LLAMA3 | {"rope_theta": theta, "factor": float(factors.max())}
    scaled = copy.deepcopy(config)
    scaled.rope_parameters = found
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    unscaled = theta ** -(np.arange(len(factors)) / len(factors))
    if not np.allclose(unscaled / frequencies.double().numpy(), factors, rtol=1e-3):
        raise ValueError("rope_freqs.weight has other factors than Llama 3's")
    return found


# ---- split files


def parts_of(path: Path) -> list[Path]:
    """Return all parts of a split file in order; only ``path`` for a whole one."""
    part = _PART.search(path.name)
    if part is None:
        return [path]
    stem, count = path.name[: part.start()], int(part[2])
    parts = [path.with_name(f"{stem}-{at:05}-of-{count:05}.gguf") for at in range(1, count + 1)]
    missing = [each.name for each in parts if not each.is_file()]
    if missing:
        raise ModelNotFoundError(f"{path.parent} lacks parts of the model: {', '.join(missing)}")
    return parts


@contextmanager
def _in_one_file(path: Path, folder: Path | None = None) -> Iterator[Path]:
    """Give one file with the suffix that transformers expects; a temporary one if necessary."""
    parts = parts_of(path)
    if len(parts) == 1 and path.suffix == ".gguf":
        yield path.absolute()
        return
    with tempfile.TemporaryDirectory(prefix=".joining-", dir=folder) as made:
        whole = Path(made) / "model.gguf"
        if len(parts) == 1:
            whole.symlink_to(path.absolute())
        else:
            _join(parts, whole)
        yield whole


def _join(parts: Sequence[Path], whole: Path) -> None:
    """Write the parts of a split file as one file."""
    try:
        readers = [GGUFReader(part) for part in parts]
        fields = readers[0].fields
        writer = GGUFWriter(whole, fields["general.architecture"].contents())
        for key, field in fields.items():
            if not key.startswith(("GGUF.", "split.", "general.architecture")):
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], inner)
        for reader in readers:
            for each in reader.tensors:
                writer.add_tensor(each.name, each.data, raw_dtype=each.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except Exception as error:
        raise ModelNotFoundError(f"{parts[0]} cannot be joined: {error!r}") from error
