"""A probe of the rotation of keys in each layer of an untested model family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ragkv.model.architecture import Architecture
from ragkv.model.calls import cache_argument, require_used
from ragkv.model.rotary import TURNS, RopeKind, RotaryTables, unrotate

_PLACES = (0, 37, 150)
_IDS = range(40, 56)


class KeyProbe:
    """Each layer's keys of the same tokens at several positions.

    Rotary attention depends only on differences of positions, so these keys differ only in their
    rotation.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        ids = torch.tensor([list(_IDS)], device=model.device)
        self._places = [
            torch.arange(first, first + len(_IDS), device=model.device) for first in _PLACES
        ]
        self._keys: list[list[torch.Tensor]] = []
        for positions in self._places:
            cache = DynamicCache()
            given = cache_argument(model, cache)
            model(ids, position_ids=positions[None], use_cache=True, **given)
            require_used(cache.get_seq_length(), len(_IDS), "rows in the cache")
            layers: list[Any] = cache.layers
            self._keys.append([layer.keys for layer in layers])

    def distance(self, layer: int, kind: RopeKind, rotary: RotaryTables) -> float:
        """Return the largest difference of a layer's unrotated keys, in standard deviations."""
        first, *others = (
            unrotate(keys[layer], rotary.at(kind, positions)).float()
            for keys, positions in zip(self._keys, self._places, strict=True)
        )
        return max(float((other - first).abs().max() / first.std()) for other in others)


def probe_rope_kinds(
    model: PreTrainedModel, architecture: Architecture, rotary: RotaryTables
) -> tuple[RopeKind, ...]:
    """Return for each layer the kind of rotation with the least :meth:`KeyProbe.distance`.

    :func:`ragkv.engine.check.verify.check_model` checks that it is small enough.
    """
    probe = KeyProbe(model)
    return tuple(
        min(
            (RopeKind(kind.table, turn) for turn in TURNS),
            key=lambda tried: probe.distance(layer, tried, rotary),
        )
        for layer, kind in enumerate(architecture.rope_kinds)
    )
