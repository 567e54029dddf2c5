"""What a model runs on, by name."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """Return the device's own name: the GPU's, or the processor's and the threads used."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
