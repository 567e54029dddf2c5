"""What a corpus is going to take: bytes by codec, ingestion, and where loading pays.

From the model's configuration alone. Loading wins where an entry's bytes come faster than
its tokens are computed (DESIGN's performance model): ``bytes / bandwidth < prefill``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ragkv.errors import ModelNotFoundError, UnsupportedModelError
from ragkv.model.default_model import DEFAULT_MODEL, default_model_folder
from ragkv.store.entry.codecs import codec_of

CODECS = ("raw", "int8", "int4")
_TOKENS_ENCODED = 512
_IDS_AND_OFFSETS = 12


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the bytes of a model's caches: ``[layers, kv_heads, tokens, head_dim]``."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_token(self, codec: str) -> float:
        """Return the bytes that a token takes in a store, found by encoding one layer."""
        size = (2, self.kv_heads, _TOKENS_ENCODED, self.head_dim)
        keys, values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(self.dtype)
        nbytes = sum(
            len(memoryview(part).cast("B")) for part in codec_of(codec).encode(keys, values)
        )
        return self.layers * nbytes / _TOKENS_ENCODED + _IDS_AND_OFFSETS


def shape_of(model: str | Path | None, dtype: torch.dtype | None = None) -> Shape:
    """Read a model's configuration; no weights are loaded.

    Parameters
    ----------
    model
        Hub name or folder, None for the embedded model.
    dtype
        The dtype it will run in; None is the configuration's.

    Raises
    ------
    ModelNotFoundError
        There is no such configuration on this machine.
    UnsupportedModelError
        It does not determine the shape of keys and values.
    """
    place = default_model_folder() if model is None or str(model) == DEFAULT_MODEL else model
    try:
        config = AutoConfig.from_pretrained(str(place)).get_text_config()
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"no configuration of {str(place)!r}: {error}. Give a hub name, or a folder with a "
            "config.json"
        ) from error
    try:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        layers = config.num_hidden_layers
    except AttributeError as error:
        raise UnsupportedModelError(
            f"the configuration of {str(place)!r} does not determine the shape of its caches: "
            f"{error}"
        ) from error
    found = dtype or config.dtype or torch.float32
    return Shape(DEFAULT_MODEL if model is None else str(model), layers, kv_heads, head_dim, found)


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """What one codec means for a corpus.

    ``load_s`` is for one chunk. ``break_even_gbps`` is the bandwidth (GB/s) above which
    loading a chunk is faster than computing it.
    """

    codec: str
    bytes_per_token: float
    total_bytes: float
    load_s: float
    break_even_gbps: float
    loading_wins: bool


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What a corpus takes. ``compute_s`` is for one chunk, ``ingestion_s`` for all."""

    model: str
    dtype: str
    chunks: int
    tokens: int
    disk_gbps: float
    compute_s: float
    ingestion_s: float
    codecs: tuple[CodecPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types."""
        return asdict(self)


def plan(
    shape: Shape,
    *,
    chunks: int,
    tokens: int,
    disk_gbps: float,
    costs: Callable[[int, int], float],
) -> CapacityPlan:
    """Work out what a corpus takes.

    Parameters
    ----------
    chunks, tokens
        Number of chunks, and tokens of each.
    disk_gbps
        What the store delivers, in 1e9 bytes a second.
    costs
        Seconds of a prefill of ``(cached, new)`` tokens.
    """
    compute = costs(0, tokens)
    rows = []
    for codec in CODECS:
        per_token = shape.bytes_per_token(codec)
        nbytes = per_token * tokens
        load = nbytes / (disk_gbps * 1e9)
        even = nbytes / compute / 1e9
        rows.append(CodecPlan(codec, per_token, nbytes * chunks, load, even, load < compute))
    return CapacityPlan(
        model=shape.name,
        dtype=str(shape.dtype).removeprefix("torch."),
        chunks=chunks,
        tokens=tokens,
        disk_gbps=disk_gbps,
        compute_s=compute,
        ingestion_s=chunks * compute,
        codecs=tuple(rows),
    )
