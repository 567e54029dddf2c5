"""The arithmetic bound: what a pass over some of a prompt's rows must cost at least.

It is made of measurements: linear and attention time of full prefills, and loading rates.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragkv.decode.prefill import full_prefill
from ragkv.errors import ConfigError
from ragkv.model.architecture import backbone_of
from ragkv.model.calls import require_used
from ragkv.model.loaded import ReusableModel
from ragkv_bench.speed.timing import synchronise, timed

Positions = npt.NDArray[np.int64]
_BLOCK_BYTES = 64 << 20
_MATRIX_BYTES = 1 << 30
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Costs:
    """What a full prefill of ``tokens`` tokens spends its time on.

    ``linear_s`` are the seconds outside attention: projections, MLPs, norms, the last token's
    logits. Attention has one figure a layer, and the layer's sliding window, or None.
    """

    tokens: int
    linear_s: float
    attention_s: tuple[float, ...]
    windows: tuple[int | None, ...]

    @property
    def prefill_s(self) -> float:
        """Seconds of the whole prefill."""
        return self.linear_s + sum(self.attention_s)

    def bound_s(self, rows: Positions, load_s: float) -> float:
        """Return the least seconds for computing ``rows`` while the other rows are loaded.

        At a full prefill's rates the linear part is ``len(rows) / tokens`` of a prefill's, a
        layer's attention the rows' share of the causal area. Loading overlaps computation: only
        its excess adds to the time.
        """
        every = np.arange(self.tokens)
        shares = {
            window: causal_area(rows, window) / causal_area(every, window)
            for window in set(self.windows)
        }
        layers = zip(self.attention_s, self.windows, strict=True)
        attention = sum(seconds * shares[window] for seconds, window in layers)
        return max(load_s, len(rows) / self.tokens * self.linear_s + attention)


def causal_area(rows: Positions, window: int | None = None) -> int:
    """Count the pairs of query row and key that causal attention must look at.

    ``rows`` are positions in the prompt: row p sees the keys 0 to p, at most ``window`` of them,
    itself included.
    """
    seen = rows.astype(np.int64) + 1
    return int((seen if window is None else np.minimum(seen, window)).sum())


def timed_prefill(loaded: ReusableModel, ids: Sequence[int]) -> Costs:
    """Prefill a prompt's token ids in full and time the parts."""
    with timed_attention(loaded.model) as times:
        total, _ = timed(loaded.device, lambda: _prefill(loaded, ids))
    layers = [times.seconds(layer) for layer in range(loaded.architecture.layers)]
    require_used(sum(map(bool, layers)), len(layers), "layers that called the timed attention")
    return Costs(len(ids), total - sum(layers), tuple(layers), loaded.architecture.windows)


def _prefill(loaded: ReusableModel, ids: Sequence[int]) -> None:
    logits, _ = full_prefill(loaded, np.asarray(ids, dtype=np.int32))
    int(logits.argmax())


class LayerTimes:
    """When each layer's attention began and ended, by the device's clock where it is a GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[int, list[Any]] = {}

    def mark(self, layer: int) -> None:
        """Note a beginning, or the end of the last beginning; on a GPU nothing waits."""
        mark: Any = time.perf_counter()
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(self._device))
        self._marks.setdefault(layer, []).append(mark)

    def seconds(self, layer: int) -> float:
        """Return the sum of a layer's times; waits for the device."""
        synchronise(self._device)
        marks = self._marks.get(layer, [])
        pairs = zip(marks[::2], marks[1::2], strict=True)
        if self._device.type == "cuda":
            return float(sum(first.elapsed_time(last) / 1000 for first, last in pairs))
        return float(sum(last - first for first, last in pairs))


@contextmanager
def timed_attention(model: PreTrainedModel) -> Iterator[LayerTimes]:
    """Time the attention function that the model uses, inside the block.

    Raises ConfigError: the model's attention is none of transformers' registered functions.
    """
    config = backbone_of(model).config
    before = str(config._attn_implementation)
    if before not in ALL_ATTENTION_FUNCTIONS or before not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ConfigError(
            f"attention {before!r} cannot be timed: load the model with attn_implementation='sdpa'"
        )
    plain: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[before]
    times = LayerTimes(model.device)

    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        times.mark(layer)
        found = plain(module, *args, **kwargs)
        times.mark(layer)
        return found

    name = f"{before}_timed"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    config._attn_implementation = name
    try:
        yield times
    finally:
        config._attn_implementation = before


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


def memory_rate(device: torch.device) -> float:
    """Return bytes a second at which a product of a large matrix with a vector reads it."""
    matrix = torch.ones(_MATRIX_BYTES >> 14, 1 << 12, device=device)
    return _best_rate(lambda: float((matrix @ matrix[0])[0]), matrix.nbytes)


def _best_rate(move: Callable[[], object], nbytes: int = _BLOCK_BYTES) -> float:
    move()
    return nbytes / min(timed(torch.device("cpu"), move)[0] for _ in range(_TRIES))
