"""Recorders of a function's work on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

_WARM_UPS = 2
"""Calls before a capture: they compile kernels and allocate workspaces."""

Compute = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Captures a function's work."""

    def capture(self, compute: Compute) -> tuple[Callable[[], object], torch.Tensor]:
        """Return a function that repeats the work, and the tensor with its result."""
        ...

    def pause(self, work: Callable[[], object]) -> None:
        """Run ``work`` at this place of every repetition, but not now: it is not captured.

        Called by the function that is captured.
        """
        ...


class CudaRecorder:
    """Captures CUDA graphs in one memory pool, one for each part between pauses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._parts: list[Callable[[], object]] = []

    def capture(self, compute: Compute) -> tuple[Callable[[], object], torch.Tensor]:
        """Capture on a side stream; other threads can use the device meanwhile."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        parts = self._parts
        with torch.cuda.stream(self._stream):
            self._begin()
            try:
                out = compute()
            finally:
                self._end()
                self._parts = []

        def replay() -> None:
            for part in parts:
                part()

        return replay, out

    def pause(self, work: Callable[[], object]) -> None:
        """End a graph, and begin the next one; see :class:`Recorder`."""
        if self._graph is not None:
            self._end()
            self._parts.append(work)
            self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()
            self._parts.append(graph.replay)
