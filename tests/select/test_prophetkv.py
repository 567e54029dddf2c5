"""ProphetKV's scores, against transformers' eager attention over the unrepaired cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiny import some_chunks, tiny_model
from transformers.cache_utils import DynamicCache

from ragkv import RagKV
from ragkv.select import Scene, get_method
from ragkv.select.method import FloatArray
from ragkv.splice.layout import Origin

Make = Callable[..., RagKV]
CHUNKS = [some_chunks(4, words)[index] for index, words in enumerate((30, 15, 50, 22))]
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]


def plain_scores(family: str, scene: Scene) -> npt.NDArray[np.float64]:
    """Run the uncached tokens in turn, each over the rows before it, and take what they pay."""
    layout, model = scene.layout, tiny_model(family, "eager")
    keys, values = scene.cache.keys.clone(), scene.cache.values.clone()
    cache = DynamicCache()
    context = layout.query_start
    total = np.zeros(context)
    rows = 0
    for fresh, run in itertools.groupby(
        range(len(layout)), lambda at: layout.origin[at] == Origin.FRESH
    ):
        places = list(run)
        if not fresh:
            for layer in range(len(keys)):
                cache.update(keys[layer, :, places][None], values[layer, :, places][None], layer)
            continue
        with torch.no_grad():
            ids = torch.from_numpy(layout.ids[places].astype(np.int64))[None]
            where = torch.tensor([places])
            out = model(ids, position_ids=where, past_key_values=cache, output_attentions=True)
        for layer in out.attentions:
            for head in layer[0].double().numpy():
                for place, row in zip(places, head, strict=True):
                    if place < context:
                        continue
                    others = row[context:].sum()
                    share = row[:context] / max(1 - others, 1e-30)  # a learned sink's part stays
                    total += share / len(layer[0]) / len(out.attentions)
        rows += sum(place >= context for place in places)
    return total[layout.cached] / rows


def spy_on(name: str, look: Callable[[Scene], Any]) -> tuple[Any, list[Any]]:
    method, seen = get_method(name), []

    def score(scene: Scene) -> FloatArray:
        assert method.score is not None
        seen.append(look(scene))
        found = method.score(scene)
        seen.append(found)
        return found

    return replace(method, score=score), seen


@pytest.mark.parametrize("block", [3, 256])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "phi3", "mistral-window", "gemma3", "gemma2", "gpt-oss"]
)
def test_scores_are_the_querys_attention_to_the_context_alone(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, family: str, block: int
) -> None:
    monkeypatch.setattr("ragkv.attend.observe._ROW_BLOCK", block)
    engine = make_engine(family)
    engine.precompute(CHUNKS)
    method, seen = spy_on("prophetkv", lambda scene: plain_scores(family, scene))
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
