"""Memory of the host and devices: sizes, the part for keys and values, and running out of it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from ragkv.errors import OutOfMemoryError, RagKVError
from ragkv.model.architecture import config_of
from ragkv.model.loaded import LoadedModel, ReusableModel

Given = ParamSpec("Given")
Done = TypeVar("Done")

_UNKNOWN_TOTAL = 16 << 30
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files of versions 2 and 1 of Linux's control groups; ``max`` is no limit."""
TOGETHER, TOGETHER_CPU = 8192, 1024
"""Most rows of a prompt whose feed-forward is computed together."""
_MASKED = 1024
"""Rows of a pass that attend under one mask."""
_OTHERS_SHARE = 2
"""Divisor of the host's memory: the rest is left to other programs."""
_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Messages of plain RuntimeErrors by torch's CPU allocator, CUDA's libraries and Triton."""


def total_bytes(device: torch.device) -> int:
    """Return the size of a device's memory; for the CPU, of the container's or the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        total = _UNKNOWN_TOTAL
    for path in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):
            total = min(total, int(path.read_text()))
    return total


def budget_of(nbytes: float | None) -> int:
    """Return a budget of the host's memory in bytes; None is an eighth of it."""
    return total_bytes(torch.device("cpu")) // 8 if nbytes is None else int(nbytes)


def room_for_kv(loaded: ReusableModel, tokens: int, *, running: int, tiers: int) -> int:
    """Return the bytes available for keys and values while a prompt is computed.

    On CUDA these are the free bytes and those that keys and values take already, less the tiers'
    budgets and a pass's own memory. Elsewhere it is half of the memory that weights, tiers and a
    pass leave; the rest is for other programs.

    Parameters
    ----------
    tokens
        The prompt's tokens.
    running
        Bytes of keys and values in use.
    tiers
        Budgets of the tiers on the device, in bytes.
    """
    needed = tiers + pass_bytes(loaded, tokens)
    if loaded.device.type == "cuda":
        return free_bytes(loaded.device) + running - needed
    weights = sum(weight.nbytes for weight in loaded.model.parameters())
    return (total_bytes(loaded.device) - weights - needed) // _OTHERS_SHARE


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device's memory that this process can still allocate.

    They respect torch's limit for the process (``set_per_process_memory_fraction``).
    """
    free: int
    total: int
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    fraction: Any = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    new = max(0, min(free, int(fraction(device) * total) - held))
    return new + held - int(torch.cuda.memory_allocated(device))


def pass_bytes(loaded: ReusableModel, tokens: int) -> int:
    """Return an upper estimate of the bytes of a pass over a prompt, without its cache.

    It counts a layer's hidden states, queries and attention of all rows, the feed-forward of some,
    a mask with and without padding, the layer's keys and values for each query head, and logits.
    """
    config: Any = config_of(loaded.model)
    shape, hidden = loaded.architecture, int(config.hidden_size)
    heads = int(getattr(config, "num_attention_heads", shape.kv_heads)) * shape.head_dim
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    together = min(tokens, TOGETHER_CPU if loaded.device.type == "cpu" else TOGETHER)
    values = tokens * (6 * hidden + 3 * heads) + together * 3 * wide
    values += 2 * min(tokens, _MASKED) * tokens + 2 * tokens * heads
    return values * loaded.dtype.itemsize + 8 * int(config.vocab_size)


def lack_of_memory(loaded: ReusableModel, tokens: int, *, others: int) -> OutOfMemoryError:
    """Return the error for a request of ``tokens`` rows, with ``others`` requests beside it."""
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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the host's or a device's memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    plain = isinstance(error, RuntimeError) and not isinstance(error, RagKVError)
    return plain and any(part in str(error) for part in _MESSAGES)


def release_calls(error: BaseException) -> str:
    """Drop the frames of an error and its causes; return the formatted traceback.

    Their local variables hold tensors of the failed request and of others.
    """
    calls = "".join(traceback.format_tb(error.__traceback__))
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None  # a frame holds its function and closure
        each = each.__cause__ or each.__context__
    return calls


def release_unused(loaded: LoadedModel) -> None:
    """Free memory that is kept for later requests."""
    loaded.workspace.release()
    if loaded.device.type != "cpu":
        device: Any = torch.get_device_module(loaded.device)
        getattr(device, "empty_cache", lambda: None)()


def typed_memory_errors(call: Callable[Given, Done]) -> Callable[Given, Done]:
    """Decorate a call to raise OutOfMemoryError, which holds no tensors, when memory runs out."""

    @wraps(call)
    def typed(*args: Given.args, **kwargs: Given.kwargs) -> Done:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if isinstance(error, OutOfMemoryError):
                traceback.clear_frames(error.__traceback__)
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
            calls = release_calls(error)
        failure = OutOfMemoryError(
            f"Memory ran out ({reason}): run fewer requests at once (max_running, kv_bytes), or "
            "give the store's tiers less (memory_bytes, device_bytes, history_bytes)"
        )
        failure.add_note(calls)
        raise failure

    return typed


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
