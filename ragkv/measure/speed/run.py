"""A whole benchmark: measure, compare with peers, and describe the machine."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import ragkv
from ragkv.measure.speed.costs import attention_name
from ragkv.measure.speed.peers.base import Peer, compare, reference
from ragkv.measure.speed.result import Benchmark
from ragkv.measure.speed.ttft import Bench, Measured, TtftPlan
from ragkv.model.loaded import LoadedModel

Opening = Callable[[], AbstractContextManager[Peer]]
"""Makes a peer that runs inside a ``with`` block."""


def bench_ttft(
    loaded: LoadedModel,
    plan: TtftPlan,
    *,
    auxiliary_model: str | None = None,
    peers: Sequence[Opening] = (),
    show_progress: bool = False,
) -> Benchmark:
    """Measure times to first token against full prefill, the bound and peers.

    Raises
    ------
    ConfigError, PromptTooLongError
        As :meth:`ragkv.measure.speed.ttft.Bench.run`.
    PeerError
        A peer does not start or gives no token.
    """
    bench = Bench(loaded, plan, auxiliary_model=auxiliary_model)
    measured = bench.run(show_progress=show_progress)
    against = reference(plan.settings)
    return Benchmark(
        model=loaded.name,
        device=device_name(loaded.device),
        rows=tuple(bench.rows(measured)),
        peers=tuple(row for peer in peers for row in compare(peer(), measured, against)),
        costs=tuple(_costs(one) for one in measured),
        setup={
            **_setup(loaded),
            "plan": json.loads(json.dumps(asdict(plan))),
            "bytes_per_s": dict(bench.rates),
        },
    )


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


def _costs(measured: Measured) -> dict[str, Any]:
    costs = measured.costs
    return {
        "tokens": measured.trace.tokens,
        "prompt_tokens": costs.tokens,
        "prefill_s": costs.prefill_s,
        "linear_s": costs.linear_s,
        "attention_s": sum(costs.attention_s),
    }


def _setup(loaded: LoadedModel) -> dict[str, Any]:
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
