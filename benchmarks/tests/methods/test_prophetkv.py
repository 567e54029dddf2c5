"""ProphetKV's scores, against transformers' eager attention over the unrepaired cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from plain_attention import WITHOUT_WINDOW, plain_attention, spy_on
from tiny import UNEVEN, ask

from ragkv import RagKV
from ragkv.select import Scene
from ragkv.splice.layout import Origin
from ragkv_bench.methods import prophetkv

Make = Callable[..., RagKV]
PROMPT = ask(UNEVEN, "\n\nWhat does it say?")
FAMILIES = ["llama", "mistral-window", "gemma3", "gemma2", "gpt-oss"]


def prophetkv_scores(family: str, scene: Scene) -> npt.NDArray[np.float64]:
    layout, context = scene.layout, scene.layout.query_start
    total, count = np.zeros(context), 0
    for at, layer in enumerate(plain_attention(family, scene)):
        if at not in WITHOUT_WINDOW.get(family, range(4)):
            continue
        for head in layer:
            for row in head:
                share = row[:context] / max(1 - row[context:].sum(), 1e-30)  # a sink's part stays
                total += share
                count += 1
    return total[layout.cached] / count


@pytest.mark.parametrize("block", [3, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_prophetkvs_scores_are_the_querys_attention_to_the_context_alone(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, family: str, block: int
) -> None:
    monkeypatch.setattr("ragkv_bench.methods.prophetkv.ROW_BLOCK", block)
    engine = make_engine(family)
    engine.precompute(UNEVEN)
    method, seen = spy_on(prophetkv.METHOD, lambda scene: prophetkv_scores(family, scene))
    report = engine.prefill(PROMPT, method=method, recompute_ratio=0.3).report
    expected, scores = seen
    assert scores.dtype == np.float32
    assert expected.max() > 1.2 * expected.mean()
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)
    origin = np.frombuffer(report.positions, np.uint8)
    cached = np.flatnonzero((origin == Origin.CACHED) | (origin == Origin.RECOMPUTED))
    first = report.chunks[0].end
    best = [at for at in cached[np.argsort(-scores, kind="stable")] if at >= first]
    chosen = np.flatnonzero(origin == Origin.RECOMPUTED)
    assert chosen.tolist() == sorted(best[: round(0.3 * len(cached))])
