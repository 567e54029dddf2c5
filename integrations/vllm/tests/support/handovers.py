"""Hand-overs to vLLM of a model's own exact KV or of any rows, whole or spoiled."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm_ragkv.handover import HandOverFolder

Rows = list[tuple[torch.Tensor, torch.Tensor]]
"""Each layer's keys and values, ``[tokens, kv_heads, head_dim]``."""


def exact_rows(model: Any, ids: list[int]) -> Rows:
    """Return the KV that the model itself computes for a prompt."""
    with torch.inference_mode():
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    return [
        (layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers
    ]


def write(
    folder: Path,
    instance: str,
    ids: list[int],
    rows: Rows,
    /,
    *,
    expires_in: float = 600,
    **changed: Any,
) -> str:
    """Write a hand-over of the KV of ``ids`` and return its id; ``changed`` spoils what it says."""
    keys, values = (torch.stack(part).transpose(1, 2) for part in zip(*rows, strict=True))
    form = str(keys.dtype).removeprefix("torch."), instance
    into = HandOverFolder(folder, most_bytes=1 << 30, expires_in=expires_in)
    identity = into.write(np.array(ids, np.int32), keys, values, *form)
    if changed:
        path = file_of(folder, identity)
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        told = header["__metadata__"]
        told["ragkv"] = json.dumps(json.loads(told["ragkv"]) | changed)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return identity


def file_of(folder: Path, identity: str, suffix: str = ".safetensors") -> Path:
    """Return the file that an id names."""
    return folder / (base64.urlsafe_b64decode(identity + "=")[:16].hex() + suffix)
