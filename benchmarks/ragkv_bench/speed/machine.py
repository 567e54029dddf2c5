"""The machine, the versions and the commit that figures are of."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import ragkv
from ragkv.model.loaded import LoadedModel
from ragkv_bench.speed.costs import attention_name


def setup_of(loaded: LoadedModel) -> dict[str, Any]:
    """Return what figures depend on: dtype, threads, versions and the commit."""
    return {
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "attention": attention_name(loaded.model),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Return the commit of the repository whose folder ``ragkv/`` this package is, if any."""
    command = ["git", "rev-parse", "--show-prefix", "--short", "HEAD"]
    folder = Path(ragkv.__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None
    prefix, _, commit = done.stdout.strip().partition("\n")
    return commit if prefix == "ragkv/" else None
