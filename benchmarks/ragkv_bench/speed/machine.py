"""What figures are of: the device, the versions and the commit."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import ragkv
from ragkv.model.architecture import backbone_of
from ragkv.model.loaded import LoadedModel
from ragkv_bench.results import Found, short_name


def setup_of(loaded: LoadedModel, plan: Any) -> dict[str, Any]:
    """Return what figures depend on: dtype, threads, versions, the commit and the plan."""
    return {
        "plan": asdict(plan),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "attention": backbone_of(loaded.model).config._attn_implementation,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "commit": commit(),
    }


def device_name(device: torch.device) -> str:
    """Return the device's own name: the GPU's, or the processor's and the threads used."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_processor()}, {torch.get_num_threads()} threads"


def title_of(found: Found) -> str:
    """Return a result's model, without the way to it, and its device."""
    return f"{short_name(found['model'])} on {found['device']}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the repository whose folder ``ragkv/`` this package is, if any."""
    command = ["git", "rev-parse", "--show-prefix", "--short", "HEAD"]
    folder = Path(ragkv.__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None
    prefix, _, commit = done.stdout.strip().partition("\n")
    return commit if prefix == "ragkv/" else None
