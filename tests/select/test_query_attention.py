"""Scores by the query's attention, against transformers' eager attention over the unrepaired cache."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from plain_attention import WITHOUT_WINDOW, plain_attention, spy_on
from tiny import UNEVEN, ask

from ragkv import RagKV
from ragkv.select import Scene, get_method

Make = Callable[..., RagKV]
PROMPT = ask(UNEVEN, "\n\nWhat does it say?")
FAMILIES = ["llama", "qwen3", "phi3", "mistral-window", "gemma3", "gemma2", "gpt-oss"]


def query_scores(family: str, scene: Scene) -> npt.NDArray[np.float64]:
    last, most = np.zeros((2, len(scene.layout.cached)))
    for at, layer in enumerate(plain_attention(family, scene)):
        if at in (1, 2) and at in WITHOUT_WINDOW.get(family, range(4)):
            heads = layer[:, :, scene.layout.cached]
            last += heads[:, -1].mean(axis=0)
            most += heads.max(axis=1).mean(axis=0)
    return (last / last.sum() + most / most.sum()) / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_query_is_scored_in_the_middle_layers_that_see_the_whole_prompt(
    make_engine: Make, family: str
) -> None:
    engine = make_engine(family)
    engine.precompute(UNEVEN)
    method, seen = spy_on(get_method("query"), lambda scene: query_scores(family, scene))
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
