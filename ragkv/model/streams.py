"""Copies to a GPU while it computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class SideStream:
    """A stream for copies from the host, which run while the device computes.

    On the CPU, and on devices without streams, copies are synchronous. Each device has one,
    :func:`side_stream`, since torch reserves memory for every stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        has_any = device.type != "cpu" and hasattr(self._streams, "Stream")
        self._own = self._streams.Stream(device) if has_any else None

    def wait_for_compute(self) -> None:
        """Make its next work wait for all work queued on the current stream."""
        if self._own is not None:
            self._own.wait_stream(self._streams.current_stream(self._device))

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Queue the block's work on this stream; later work of the current stream waits for it."""
        if self._own is None:
            yield
            return
        current = self._streams.current_stream(self._device)
        try:
            with self._streams.stream(self._own):
                yield
        finally:
            current.wait_stream(self._own)


class _PlanFree:
    """Attention without cuDNN in blocks of several threads, which overlap in any order.

    cuDNN plans each new length, which takes 40 ms on a Hopper GPU, and prompts have new lengths.
    torch's setting is global; the end of the last block restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._before = True

    @contextmanager
    def block(self) -> Iterator[None]:
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                known: Any = torch.backends.cuda
                self._before = known.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    torch.backends.cuda.enable_cudnn_sdp(self._before)


_plan_free = _PlanFree()


def without_plans(device: torch.device) -> AbstractContextManager[None]:
    """Compute attention on a GPU without cuDNN's plans in the block."""
    return _plan_free.block() if device.type == "cuda" else nullcontext()


def wait_for(device: torch.device) -> None:
    """Return when the device has finished the current stream's work."""
    if device.type == "cpu":
        return
    streams: Any = torch.get_device_module(device)
    if hasattr(streams, "current_stream"):
        streams.current_stream(device).synchronize()
    else:
        torch.accelerator.synchronize(device)


_side: dict[torch.device, SideStream] = {}
_making = threading.Lock()


def side_stream(device: torch.device) -> SideStream:
    """Return the device's side stream, the same for all threads."""
    with _making:
        if device not in _side:
            _side[device] = SideStream(device)
        return _side[device]


def all_to_device(
    several: Sequence[npt.NDArray[np.int64]], device: torch.device
) -> list[torch.Tensor]:
    """Copy arrays to the device as :func:`to_device`, in one transfer."""
    sizes = [part.size for part in several]
    flat = to_device(np.concatenate([part.reshape(-1) for part in several]), device)
    parts = torch.split(flat, sizes)
    return [part.view(numbers.shape) for part, numbers in zip(parts, several, strict=True)]


def to_device(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy numbers to the device, with CUDA asynchronously."""
    here = torch.from_numpy(numbers)
    if device.type == "cuda":
        return here.pin_memory().to(device, non_blocking=True)
    return here.to(device)
