"""What the bound is made of, measured: linear and attention time, and loading rates."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragkv.decode.full import full_prefill
from ragkv.errors import ConfigError
from ragkv.model.architecture import backbone_of
from ragkv.model.calls import require_used
from ragkv.model.loaded import ReusableModel
from ragkv_bench.speed.time_bound import Costs

_BLOCK_BYTES = 64 << 20
_TRIES = 5


class AttentionTimer:
    """Seconds within attention, layer by layer.

    On a CUDA device they are taken by events on the stream, so that nothing waits.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self._device = device
        self._seconds = [0.0] * layers
        self._events: list[tuple[int, Any, Any]] = []

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Add the block's time to a layer."""
        if self._device.type != "cuda":
            before = time.perf_counter()
            yield
            self._seconds[index] += time.perf_counter() - before
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self._device)
        first.record(computing)
        yield
        last.record(computing)
        self._events.append((index, first, last))

    def seconds(self) -> list[float]:
        """Return the seconds of each layer; waits for the device."""
        synchronise(self._device)
        for index, first, last in self._events:
            self._seconds[index] += first.elapsed_time(last) / 1000
        self._events.clear()
        return self._seconds


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def attention_name(model: PreTrainedModel) -> str:
    """Return what transformers calls the model's attention, such as ``sdpa``."""
    return str(backbone_of(model).config._attn_implementation)


@contextmanager
def timed_attention(model: PreTrainedModel, timer: AttentionTimer) -> Iterator[None]:
    """Time the attention function that the model uses, inside the block.

    Raises
    ------
    ConfigError
        The model's attention is none of transformers' registered functions.
    """
    config = backbone_of(model).config
    before = attention_name(model)
    if before not in ALL_ATTENTION_FUNCTIONS or before not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ConfigError(
            f"attention {before!r} cannot be timed: load the model with attn_implementation='sdpa'"
        )
    plain: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[before]

    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with timer.layer(int(module.layer_idx)):  # type: ignore[arg-type]
            return plain(module, *args, **kwargs)

    name = f"{before}_timed"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


@dataclass(frozen=True, slots=True)
class Prefill:
    """One full prefill: seconds outside attention, and within it layer by layer."""

    tokens: int
    linear_s: float
    attention_s: tuple[float, ...]


def timed_prefill(loaded: ReusableModel, ids: Sequence[int]) -> Prefill:
    """Prefill a prompt's token ids in full and time the parts."""
    timer = AttentionTimer(loaded.architecture.layers, loaded.device)
    synchronise(loaded.device)
    started = time.perf_counter()
    with timed_attention(loaded.model, timer):
        logits, _ = full_prefill(loaded, np.asarray(ids, dtype=np.int32))
    int(logits.argmax())
    total = time.perf_counter() - started
    layers = timer.seconds()
    require_used(sum(map(bool, layers)), len(layers), "layers that called the timed attention")
    return Prefill(len(ids), total - sum(layers), tuple(layers))


def median_costs(prefills: Sequence[Prefill], windows: tuple[int | None, ...]) -> Costs:
    """Return the median costs of prefills of nearly one length."""
    layers = zip(*(prefill.attention_s for prefill in prefills), strict=True)
    return Costs(
        tokens=round(statistics.median(prefill.tokens for prefill in prefills)),
        linear_s=statistics.median(prefill.linear_s for prefill in prefills),
        attention_s=tuple(statistics.median(layer) for layer in layers),
        windows=windows,
    )


def copy_rate(device: torch.device) -> float:
    """Return bytes a second from host memory (pinned, where a GPU is) to the device's."""
    source = torch.full((_BLOCK_BYTES,), 1, dtype=torch.uint8, device="cpu")
    target = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        source = source.pin_memory()

    def copy() -> None:
        target.copy_(source)
        synchronise(device)

    return _best_rate(copy)


def read_rate(folder: Path) -> float:
    """Return bytes a second from a file in the folder that the system has cached."""
    buffer = bytearray(_BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(os.urandom(1 << 20) * (_BLOCK_BYTES >> 20))

        def read() -> None:
            file.seek(0)
            file.readinto(buffer)

        return _best_rate(read)


def _best_rate(move: Callable[[], None]) -> float:
    move()
    seconds = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - started)
    return _BLOCK_BYTES / min(seconds)
