"""Scores by the query's attention, against transformers' eager attention over the unrepaired cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiny import some_chunks, tiny_model
from transformers.cache_utils import DynamicCache

from ragkv import RagKV
from ragkv.model.calls import cache_argument
from ragkv.select import Scene, get_method
from ragkv.select.method import FloatArray
from ragkv.splice.layout import Origin

Make = Callable[..., RagKV]
CHUNKS = [some_chunks(4, words)[index] for index, words in enumerate((30, 15, 50, 22))]
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]
FAMILIES = ["llama", "qwen3", "phi3", "mistral-window", "gemma3", "gemma2", "gpt-oss"]
WITHOUT_WINDOW = {"gemma3": (1, 3), "gemma2": (1, 3), "gpt-oss": (1, 3)}
"""Of the layers 0 to 3; in the other families all see equally far."""


def plain_attention(family: str, scene: Scene) -> npt.NDArray[np.float64]:
    """Run the uncached tokens in turn, each over the rows before it, and take what they pay.

    Returns ``[layers, heads, rows, tokens]`` of the query's rows.
    """
    layout, model = scene.layout, tiny_model(family, "eager")
    keys, values = scene.cache.keys.clone(), scene.cache.values.clone()
    cache = DynamicCache()
    paid = np.zeros((len(keys), 0, len(layout) - layout.query_start, len(layout)))
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
            out = model(
                ids, position_ids=where, **cache_argument(model, cache), output_attentions=True
            )
        if not paid.size:
            paid = np.zeros((len(keys), out.attentions[0].shape[1], *paid.shape[2:]))
        for at, layer in enumerate(out.attentions):
            for row, place in enumerate(places):
                if place >= layout.query_start:
                    seen = layer[0, :, row].double().numpy()
                    paid[at, :, place - layout.query_start, : seen.shape[1]] = seen
    return paid


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


def query_scores(family: str, scene: Scene) -> npt.NDArray[np.float64]:
    last, most = np.zeros((2, len(scene.layout.cached)))
    for at, layer in enumerate(plain_attention(family, scene)):
        if at in (1, 2) and at in WITHOUT_WINDOW.get(family, range(4)):
            heads = layer[:, :, scene.layout.cached]
            last += heads[:, -1].mean(axis=0)
            most += heads.max(axis=1).mean(axis=0)
    return (last / last.sum() + most / most.sum()) / 2


def spy_on(name: str, look: Callable[[Scene], Any]) -> tuple[Any, list[Any]]:
    method, seen = get_method(name), []

    def score(scene: Scene) -> FloatArray:
        assert method.score is not None
        seen.append(look(scene))
        found = method.score(scene)
        seen.append(found)
        return found

    return replace(method, score=score), seen


@pytest.mark.parametrize("family", FAMILIES)
def test_query_is_scored_in_the_middle_layers_that_see_the_whole_prompt(
    make_engine: Make, family: str
) -> None:
    engine = make_engine(family)
    engine.precompute(CHUNKS)
    method, seen = spy_on("query", lambda scene: query_scores(family, scene))
    engine.prefill(PROMPT, method=method, recompute_ratio=0.3)
    expected, scores = seen
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)


def test_a_window_as_long_as_the_prompt_is_none() -> None:
    def seeing_all(tokens: int, layers: range) -> list[int]:
        model: Any = SimpleNamespace(architecture=SimpleNamespace(windows=(48, None, 48, 60)))
        scene: Any = SimpleNamespace(loaded=model, layout=range(tokens))
        return Scene.seeing_all(scene, layers)

    assert seeing_all(48, range(4)) == [0, 1, 2, 3]
    assert seeing_all(49, range(4)) == [1, 3]
    assert seeing_all(61, range(4)) == [1]
    assert seeing_all(61, range(2, 4)) == [2, 3]


@pytest.mark.parametrize("block", [3, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_prophetkvs_scores_are_the_querys_attention_to_the_context_alone(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, family: str, block: int
) -> None:
    monkeypatch.setattr("ragkv.attend.observe._ROW_BLOCK", block)
    engine = make_engine(family)
    engine.precompute(CHUNKS)
    method, seen = spy_on("prophetkv", lambda scene: prophetkv_scores(family, scene))
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
