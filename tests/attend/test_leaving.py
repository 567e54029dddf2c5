"""Rows that leave a pass between its layers, against two passes that each compute some rows."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import FAMILIES, UNEVEN, ask

from ragkv import Prefilled, RagKV
from ragkv.attend.forward import subset_forward
from ragkv.attend.observe import LayerCall
from ragkv.engine.plan import Plan
from ragkv.errors import ConfigError
from ragkv.select import Focus, Method, Scene, Sparse
from ragkv.select.method import FloatArray
from ragkv.splice.layout import Origin

Make = Callable[..., RagKV]
Positions = np.ndarray
PROMPT = ask(UNEVEN, "\n\nWhat does it say?")


def at_random(scene: Scene) -> FloatArray:
    return np.random.default_rng(0).random(len(scene.layout.cached), dtype=np.float32)


PLAIN = Method("random", score=at_random)
RANDOM = replace(PLAIN, focus=Focus(2))


class LeaveAbove:
    """All rows leave that are not in ``stay``, above one layer."""

    def __init__(self, stay: Positions, layer: int) -> None:
        self.stay, self.layer = stay, layer

    def __call__(self, call: LayerCall) -> Positions | None:
        return self.stay if call.layer == self.layer else None


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_above_the_layer_the_rows_keep_what_the_cache_has(
    make_engine: Make, family: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make_engine(family)
    kv.precompute(UNEVEN)
    plan = plan_of(kv, monkeypatch)
    stay = np.union1d(plan.spliced.layout.fresh, plan.choice.positions[::3])
    assert len(stay) < len(plan.rows)

    whole, mixed = deepcopy(plan.cache), deepcopy(plan.cache)
    subset_forward(kv.loaded, replace(plan.subset, cache=whole))
    # rows below see nothing of the layers above: there the second pass computes what it should
    for mine, theirs in zip(mixed.layers[: layer + 1], whole.layers, strict=False):
        mine.keys.copy_(theirs.keys)
        mine.values.copy_(theirs.values)
    wanted = subset_forward(kv.loaded, replace(plan.subset, rows=stay, cache=mixed))

    got = deepcopy(plan.cache)
    subset = replace(plan.subset, cache=got, leaving=LeaveAbove(stay, layer))
    torch.testing.assert_close(subset_forward(kv.loaded, subset), wanted)
    torch.testing.assert_close(got.keys, mixed.keys)
    torch.testing.assert_close(got.values, mixed.values)
    assert not torch.equal(got.values, whole.values)
    # and the model is as it was
    plain = deepcopy(plan.cache)
    subset_forward(kv.loaded, replace(plan.subset, cache=plain))
    assert torch.equal(plain.values, whole.values)


def plan_of(kv: RagKV, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan of a prompt before its rows are computed."""
    made: list[Plan] = []

    def recompute(_: object, __: object, plan: Plan) -> torch.Tensor:
        assert len(plan.cache.keys) == len(plan.cache.values)  # read: what reads them is not copied
        made.append(replace(plan, spliced=replace(plan.spliced, cache=deepcopy(plan.cache))))
        return subset_forward(kv.loaded, plan.subset)[0]

    with monkeypatch.context() as patched:
        patched.setattr("ragkv.engine.pipeline.Pipeline._recompute", recompute)
        kv.prefill(PROMPT, method=PLAIN, recompute_ratio=0.5)
    return made[0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_others_rows_are_cached_ones_above_the_layer_and_fresh_below(
    make_engine: Make, family: str
) -> None:
    kv = make_engine(family)
    kv.precompute(UNEVEN)
    stale, whole, focused = (
        kv.prefill(PROMPT, method=method, recompute_ratio=ratio)
        for method, ratio in ((PLAIN, 0), (PLAIN, 0.5), (RANDOM, 0.5))
    )
    report = focused.report
    assert report.positions == whole.report.positions  # the ratio counts all chosen tokens
    assert whole.report.focused_from is stale.report.focused_from is None
    ended = report.focused_from
    assert ended is not None
    assert 2 <= ended <= len(focused.cache.layers)
    chosen = [
        [at for at in range(use.start, use.end) if report.positions[at] == Origin.RECOMPUTED]
        for use in report.chunks
    ]

    def is_as(other: Prefilled, layer: int, rows: list[int]) -> bool:
        held, theirs = (out.cache.layers[layer].values[0, :, rows] for out in (focused, other))
        return torch.equal(held, theirs)

    left = 0
    for rows in filter(None, chosen):
        assert all(is_as(whole, layer, rows) for layer in range(ended))
        unfocused = all(is_as(stale, layer, rows) for layer in range(ended, 4))
        assert unfocused or not any(is_as(stale, layer, rows) for layer in range(1, 4))
        left += unfocused
    if ended < len(focused.cache.layers):
        assert 0 < left < len(chosen)
    two = kv.prefill(ask(UNEVEN[1:3], "\n\nWhat?"), method=RANDOM, recompute_ratio=0.5).report
    assert two.recomputed_tokens > 0
    assert two.focused_from is None


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        Focus(0)
    with pytest.raises(ConfigError, match="omit focus"):
        replace(RANDOM, drift=True)
    with pytest.raises(ConfigError, match="omit focus"):
        replace(RANDOM, sparse=Sparse(0.5, 4))
