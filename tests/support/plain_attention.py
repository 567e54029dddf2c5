"""What the uncached tokens pay to the others, by transformers' eager attention."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tiny import tiny_model
from transformers.cache_utils import DynamicCache

from ragkv.model.calls import cache_argument
from ragkv.select import Method, Scene
from ragkv.select.method import FloatArray
from ragkv.splice.layout import Origin

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


def spy_on(method: Method, look: Callable[[Scene], Any]) -> tuple[Method, list[Any]]:
    """Return the method as one that notes what ``look`` says, and its own scores."""
    seen: list[Any] = []

    def score(scene: Scene) -> FloatArray:
        assert method.score is not None
        seen.append(look(scene))
        found = method.score(scene)
        seen.append(found)
        return found

    return replace(method, score=score), seen
