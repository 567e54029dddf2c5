"""``ragkv bench ttft``: measure, and compare with peers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ragkv.model.loaded import LoadedModel
from ragkv.model.machine import device_name
from ragkv_bench.speed.machine import setup_of
from ragkv_bench.speed.peers.base import Opening, compare, reference
from ragkv_bench.speed.result import Benchmark
from ragkv_bench.speed.ttft import Bench, Measured, TtftPlan


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
        As :meth:`ragkv_bench.speed.ttft.Bench.run`.
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
            **setup_of(loaded),
            "plan": json.loads(json.dumps(asdict(plan))),
            "bytes_per_s": dict(bench.rates),
        },
    )


def _costs(measured: Measured) -> dict[str, Any]:
    costs = measured.costs
    return {
        "tokens": measured.trace.tokens,
        "prompt_tokens": costs.tokens,
        "prefill_s": costs.prefill_s,
        "linear_s": costs.linear_s,
        "attention_s": sum(costs.attention_s),
    }
