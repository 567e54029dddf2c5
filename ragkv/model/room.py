"""Room for keys and values: what weights, tiers and a pass leave of a device's memory."""

from __future__ import annotations

from typing import Any

import torch

from ragkv.errors import OutOfMemoryError
from ragkv.model.architecture import config_of
from ragkv.model.loaded import ReusableModel
from ragkv.model.memory import total_bytes

_TOGETHER, _TOGETHER_CPU = 8192, 1024
"""Rows of a prompt whose feed-forward is computed together, at most."""
_MASKED = 1024
"""Rows of a pass that attend under one mask."""
_OTHERS_SHARE = 2
"""Part of the host's memory that is left to other programs: one in so many."""


def room_for_kv(loaded: ReusableModel, tokens: int, *, running: int, tiers: int) -> int:
    """Return the bytes that keys and values may take while a prompt is computed.

    On CUDA these are what is free now and what they take already, without the budgets of tiers and
    a pass's own memory. Elsewhere it is half of what weights, tiers and a pass leave of the
    memory: other programs have the rest.

    Parameters
    ----------
    tokens
        The prompt's tokens.
    running
        Bytes that they take already.
    tiers
        Budgets of the tiers on the device, in bytes.
    """
    needed = tiers + pass_bytes(loaded, tokens)
    if loaded.device.type == "cuda":
        return free_bytes(loaded.device) + running - needed
    weights = sum(weight.nbytes for weight in loaded.model.parameters())
    return (total_bytes(loaded.device) - weights - needed) // _OTHERS_SHARE


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device's memory that this process can still take.

    torch's limit for the process (``set_per_process_memory_fraction``) holds.
    """
    free: int
    total: int
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    fraction: Any = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    new = max(0, min(free, int(fraction(device) * total) - held))
    return new + held - int(torch.cuda.memory_allocated(device))


def pass_bytes(loaded: ReusableModel, tokens: int) -> int:
    """Return an estimate of what a pass over a prompt takes at most, its cache aside.

    A layer's hidden states, queries and attention of all rows; the feed-forward of some; a mask
    with and without padding; the layer's keys and values once for each query head; the logits.
    """
    config: Any = config_of(loaded.model)
    shape, hidden = loaded.architecture, int(config.hidden_size)
    heads = int(getattr(config, "num_attention_heads", shape.kv_heads)) * shape.head_dim
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    together = min(tokens, _TOGETHER_CPU if loaded.device.type == "cpu" else _TOGETHER)
    values = tokens * (6 * hidden + 3 * heads) + together * 3 * wide
    values += 2 * min(tokens, _MASKED) * tokens + 2 * tokens * heads
    return values * loaded.dtype.itemsize + 8 * int(config.vocab_size)


def lack_of_memory(loaded: ReusableModel, tokens: int, *, others: int) -> OutOfMemoryError:
    """Return the error of a request of so many rows, with so many requests beside it."""
    kv = tokens * loaded.architecture.values_per_token * loaded.dtype.itemsize
    there = f"the machine has {_gb(total_bytes(loaded.device))}"
    if loaded.device.type == "cuda":
        there = f"{_gb(free_bytes(loaded.device))} are free on {loaded.device}"
    return OutOfMemoryError(
        f"Memory ran out: {tokens} tokens of a prompt and its answer need {_gb(kv)} for keys and "
        f"values and about {_gb(pass_bytes(loaded, tokens))} to be computed, {there}, and {others} "
        "other requests run. Let fewer run at once (kv_bytes, max_running), or give fewer tokens "
        "(a shorter prompt, max_new_tokens)"
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
