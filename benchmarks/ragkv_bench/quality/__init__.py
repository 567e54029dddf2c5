"""Evaluate: quality and speed of every method against full prefill, with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragkv_bench.data.examples import Chunk, DataError, DataSet, Example, read_data, write_data

if TYPE_CHECKING:
    from ragkv_bench.quality.calibration import Calibration, calibrate

__all__ = [
    "Calibration",
    "Chunk",
    "DataError",
    "DataSet",
    "Example",
    "calibrate",
    "read_data",
    "write_data",
]


def __getattr__(name: str) -> object:
    """Load the calibration, and torch with it, on first use."""
    if name not in {"Calibration", "calibrate"}:
        raise AttributeError(f"module 'ragkv_bench.quality' has no attribute {name!r}")
    from ragkv_bench.quality import calibration

    return getattr(calibration, name)
