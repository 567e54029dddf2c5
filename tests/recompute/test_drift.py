"""What is not recomputed moves like what is: against plain loops, in many families."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from rotation import turned
from tiny import UNEVEN, ask

from ragkv import Completion, Prefilled, RagKV, ReuseConfig
from ragkv.engine import healing
from ragkv.recompute import drift
from ragkv.select import get_method
from ragkv.splice.layout import Origin

PROMPT = ask(UNEVEN, "\n\nWhat does it say?")
COMPUTED = (Origin.RECOMPUTED, Origin.EXACT, Origin.REPAIRED)


def rows_of(engine: RagKV, cache: object, layer: int, places: list[int]) -> dict[int, torch.Tensor]:
    """Keys (unrotated) beside values ``[2 * kv_heads, head_dim]`` of some places."""
    held = cache.layers[layer]
    return {
        at: torch.cat([turned(engine, layer, held.keys[0, :, at], at, -1), held.values[0, :, at]])
        for at in places
    }


@pytest.mark.parametrize(
    "family", ["llama", "llama-yarn", "qwen3", "mistral-window", "gemma3", "phi3"]
)
def test_rows_move_as_their_neighbours_let_expect(make_engine, family):
    assert check_rows(make_engine(family), drift.STRETCH_TOKENS) > 100


def test_long_chunks_move_in_stretches(make_engine, monkeypatch):
    monkeypatch.setattr(drift, "STRETCH_TOKENS", 12)
    assert check_rows(make_engine(), 12) > 100


def test_rows_move_alike_where_stretches_are_multiplied_together(make_engine, monkeypatch):
    """As on a GPU; stretches of several lengths, with more and fewer recomputed rows."""
    monkeypatch.setattr(drift, "_runs_together", lambda _: True)
    monkeypatch.setattr(drift, "STRETCH_TOKENS", 12)
    assert check_rows(make_engine(), 12) > 100


@pytest.mark.parametrize("together", [False, True])
def test_stretches_that_are_recomputed_as_a_whole_move_nothing(make_engine, monkeypatch, together):
    """Their rows still count for the median length; all stretches can be such."""
    monkeypatch.setattr(drift, "_runs_together", lambda _: together)

    def score(scene):
        cached = scene.layout.cached
        whole = scene.layout.placed[1].slots
        draw = np.random.default_rng(3).random(len(cached))
        return np.where(np.isin(cached, whole), 2, draw).astype(np.float32)

    method = replace(get_method("query"), score=score, spread=None, sparse=None, lookup=None)
    engine = make_engine()
    engine.precompute(UNEVEN)
    stale = engine.prefill(PROMPT, recompute_ratio=0)
    cached, chunk = places_of(stale, Origin.CACHED), stale.report.chunks[1]
    whole = {at for at in cached if chunk.start <= at < chunk.end}
    for tokens in (0, 25):  # the second chunk, and others' tokens beside it
        ratio = (len(whole) + tokens) / len(cached)
        out = engine.prefill(PROMPT, recompute_ratio=ratio, method=method)
        computed = {*places_of(out, Origin.RECOMPUTED)}
        assert whole <= computed
        assert len(computed) == len(whole) + tokens
        moved = compare(engine, stale, out, drift.STRETCH_TOKENS)
        assert moved > 100 if tokens else not moved


@pytest.mark.parametrize(
    ("family", "batched"), [("llama", False), ("llama", True), ("gemma3", False), ("phi3", False)]
)
def test_rows_that_earlier_prompts_recomputed_count_as_recomputed_now(
    make_engine, monkeypatch, family, batched
):
    """Each prompt chooses different tokens; the entries show the shift of those chosen earlier."""
    if batched:
        monkeypatch.setattr(drift, "_runs_together", lambda _: True)
    monkeypatch.setattr(drift, "STRETCH_TOKENS", 12)
    monkeypatch.setattr(healing, "ENOUGH", 1 << 30)
    engine, seen = make_engine(family, reuse=ReuseConfig()), list[list[int]]()

    def score(scene):
        draw = np.random.default_rng(len(seen))
        return draw.random(len(scene.layout.cached)).astype(np.float32)

    method = replace(get_method("query"), score=score, sparse=None, lookup=None)
    engine.precompute(UNEVEN)
    how = {"recompute_ratio": 0.15, "method": method}
    for number in range(2):
        answer = engine.generate(ask(UNEVEN, f"\n\n{number}?"), max_new_tokens=1, **how)
        seen.append(places_of(answer, Origin.RECOMPUTED))
    stale = engine.prefill(PROMPT, recompute_ratio=0, history=False)
    out = engine.prefill(PROMPT, **how)
    now = places_of(out, Origin.RECOMPUTED)
    repaired = set(places_of(out, Origin.REPAIRED))
    assert len(now) > 10
    assert repaired > {*seen[0], *seen[1]}
    assert compare(engine, stale, out, 12) > 100


def places_of(out: Prefilled | Completion, *kinds: Origin) -> list[int]:
    return [at for at, kind in enumerate(out.report.positions) if kind in kinds]


def check_rows(engine: RagKV, stretch: int) -> int:
    """Compare every row with the recomputed ones of its stretch; count those that moved."""
    engine.precompute(UNEVEN)
    stale = engine.prefill(PROMPT, recompute_ratio=0)
    return compare(engine, stale, engine.prefill(PROMPT, recompute_ratio=0.3), stretch)


def compare(engine: RagKV, stale: Prefilled, out: Prefilled, stretch: int) -> int:
    origin = list(out.report.positions)
    moved_rows = 0
    # tokens between the chunks have no entry, and count for nothing
    chunks = stale.report.chunks
    for layer in range(engine.loaded.model.config.num_hidden_layers):
        bounded = shortened(engine, stale, out, layer)
        for number, chunk in enumerate(chunks):
            places = [
                at
                for at in range(chunk.start, chunk.end)
                if stale.report.positions[at] != Origin.FRESH
            ]
            before = rows_of(engine, stale.cache, layer, places)
            after = rows_of(engine, out.cache, layer, places)
            shift = {at: after[at] - before[at] for at in places}
            if number == 0:
                assert all(shift[at].abs().max() < 1e-5 for at in places)
                continue
            seen = [at for at in places if origin[at] in COMPUTED]
            for at in set(places) - set(seen):
                part = (at - places[0]) // stretch
                near = [one for one in seen if (one - places[0]) // stretch == part]
                weights = expected_weights(at - chunk.start, *(one - chunk.start for one in near))
                expected = torch.zeros_like(shift[at])
                for weight, one in zip(weights, near, strict=True):
                    expected += weight * bounded[one]
                torch.testing.assert_close(shift[at], expected, atol=2e-5, rtol=1e-3)
                moved_rows += bool(shift[at].abs().max() > 1e-4)
    return moved_rows


def shortened(
    engine: RagKV, stale: Prefilled, out: Prefilled, layer: int
) -> dict[int, torch.Tensor]:
    """What recomputed tokens moved by, keys and values each at most as far as the median one."""
    size = {
        at: (1 + (at - chunk.start) / 20) ** -0.5
        for chunk in stale.report.chunks[1:]
        for at in range(chunk.start, chunk.end)
        if out.report.positions[at] in COMPUTED and stale.report.positions[at] != Origin.FRESH
    }
    before, after = (rows_of(engine, each.cache, layer, list(size)) for each in (stale, out))
    halves = {at: (after[at] - before[at]).chunk(2) for at in size}
    bounded = {}
    medians = []
    for kind in (0, 1):
        lengths = sorted(float(half[kind].norm()) / size[at] for at, half in halves.items())
        medians.append(lengths[(len(lengths) - 1) // 2])
    for at, half in halves.items():
        cut = [
            part * min(1.0, median * size[at] / max(float(part.norm()), 1e-30))
            for part, median in zip(half, medians, strict=True)
        ]
        bounded[at] = torch.cat(cut)
    return bounded


@cache  # all layers and runs have the same
def expected_weights(at: int, *seen: int) -> list[float]:
    """Solve for what a row takes from each recomputed one, by elimination."""

    def alike(one: int, other: int) -> float:
        apart = abs(one - other)
        common = 0.25 + 0.1 * math.exp(-apart / 40) + 0.2 * math.exp(-apart / 3)
        return common / math.sqrt((1 + one / 20) * (1 + other / 20))

    system = [[alike(one, other) for other in seen] + [alike(one, at)] for one in seen]
    for index, one in enumerate(seen):
        system[index][index] += 0.45 / (1 + one / 20)
    for pivot, row in enumerate(system):
        for other in system:
            if other is not row:
                factor = other[pivot] / row[pivot]
                for column, number in enumerate(row):
                    other[column] -= factor * number
    return [row[-1] / row[index] for index, row in enumerate(system)]


def test_without_drift_nothing_moves(make_engine):
    engine = make_engine()
    engine.precompute(UNEVEN)
    stale = engine.prefill(PROMPT, recompute_ratio=0)
    still = replace(get_method("query"), drift=False)
    out = engine.prefill(PROMPT, recompute_ratio=0.3, method=still)
    kept = [at for at, kind in enumerate(out.report.positions) if kind == Origin.CACHED]
    for before, after in zip(stale.cache.layers, out.cache.layers, strict=True):
        assert torch.equal(before.keys[:, :, kept], after.keys[:, :, kept])
        assert torch.equal(before.values[:, :, kept], after.values[:, :, kept])


def test_generate_and_prefill_drift_alike(make_engine):
    engine = make_engine()
    engine.precompute(UNEVEN)
    for ratio in (0.1, 0.5):
        logits = engine.prefill(PROMPT, recompute_ratio=ratio).logits
        answer = engine.generate(PROMPT, recompute_ratio=ratio, max_new_tokens=1)
        assert answer.token_ids == [int(logits.argmax())]


def test_low_precision_drifts_too(make_engine):
    engine = make_engine(dtype="bfloat16")
    engine.precompute(UNEVEN)
    exact = engine.prefill(PROMPT, method="full").logits
    out = engine.prefill(PROMPT, recompute_ratio=0.3)
    assert out.cache.layers[0].keys.dtype == torch.bfloat16
    assert torch.isfinite(out.logits).all()
    all_of_it = engine.prefill(PROMPT, recompute_ratio=1).logits
    torch.testing.assert_close(all_of_it, exact, atol=0.2, rtol=0.05)


def test_nothing_is_prepared_where_nothing_is_left(make_engine, monkeypatch):
    engine = make_engine()
    engine.precompute(UNEVEN)
    made: list[object] = []
    monkeypatch.setattr("ragkv.recompute.repair.Drift", lambda *given: made.append(given))
    engine.prefill(PROMPT, recompute_ratio=1.0)
    assert made == []
    engine.prefill(PROMPT, recompute_ratio=0.5)
    assert len(made) == 1
