"""Choosing tokens: budgets, windows, rules, mapping between tokenizers."""

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny import some_chunks

from ragkv import ReuseConfig
from ragkv.errors import ConfigError, UnknownMethodError
from ragkv.select import Grouping, Method, Scene, get_method, method_names, method_of
from ragkv.select.auxiliary import map_scores
from ragkv.select.choose import choose
from ragkv.select.method import FloatArray, Spread
from ragkv.splice.layout import Layout, Origin, Placed


def scene(origin: list[int], *chunks: tuple[int, int]) -> Scene:
    """A prompt of tokens of these origins; of each chunk the first position and the end."""
    ids = np.zeros(len(origin), np.int32)
    placed = tuple(
        Placed(None, at - start, at, start, end)
        for start, end in chunks
        for at in [start + np.flatnonzero(np.array(origin[start:end]) == Origin.CACHED)]
    )
    offsets = np.zeros((len(ids), 2), np.int32)
    layout = Layout(ids, offsets, 0, placed, np.array(origin, np.uint8))

    def never(*_: object) -> None:
        raise AssertionError("this rule needs no model")

    return Scene(layout, "", None, None, auxiliary=never)


def by_score(scores: list[float], **pieces: Any) -> Method:
    def score(_: Scene) -> FloatArray:
        return np.array(scores, np.float32)

    return Method("test", score=score, **pieces)


def chosen_of(method: Method, where: Scene, ratio: float) -> list[int]:
    return choose(method, where, ReuseConfig(recompute_ratio=ratio)).positions.tolist()


CACHED, FRESH = int(Origin.CACHED), int(Origin.FRESH)


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, []), (1.0, [1, 2, 4, 5])])
def test_none_and_all_need_no_scores(ratio, expected):
    def explode(_):
        raise AssertionError("no scores are needed")

    where = scene([FRESH, CACHED, CACHED, FRESH, CACHED, CACHED])
    assert chosen_of(Method("t", score=explode), where, ratio) == expected


def plain_windows(
    ranking: list[int],
    cached: set[int],
    chunks: list[tuple[int, int]],
    budget: int,
    grouping: Grouping,
) -> list[int]:
    """CacheClip's grouping in loops: the most chosen tokens whose windows fit the budget."""
    best: list[int] = []
    for count in range(len(ranking) + 1):
        chosen = set(ranking[:count])
        kept: set[int] = set()
        for start, end in chunks:
            for first in range(start, max(start, end - grouping.window) + 1):
                window = set(range(first, min(first + grouping.window, end)))
                if len(window & chosen) > grouping.threshold:
                    kept |= window & cached
        if len(kept) > budget:
            break
        best = sorted(kept)
    return best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("grouping", [Grouping(), Grouping(4, 1), Grouping(5, 4)])
def test_windows_slide_and_the_ratio_counts_after_grouping(seed, grouping):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(30, 90))
    origin = rng.choice([CACHED, FRESH], size, p=[0.9, 0.1]).tolist()
    cached = [at for at, kind in enumerate(origin) if kind == CACHED]
    ends = [0, *sorted(rng.choice(np.arange(1, size), 3, replace=False).tolist()), size]
    chunks = list(itertools.pairwise(ends))
    # runs, as attention has them
    scores = np.convolve(rng.random(len(cached)), np.ones(4), mode="same").astype(np.float32)
    ranking = [cached[index] for index in np.argsort(-scores, kind="stable")]
    method = by_score(scores.tolist(), grouping=grouping)
    for ratio in (0.05, 0.2, 0.5, 0.9):
        budget = round(ratio * len(cached))
        found = chosen_of(method, scene(origin, *chunks), ratio)
        assert found == plain_windows(ranking, set(cached), chunks, budget, grouping)
        assert len(found) <= budget


@pytest.mark.parametrize("healed", [0, 10, 20, 40])
def test_exact_history_takes_half_of_its_budget(healed):
    """A prompt with healed chunks is computed sooner, and its other chunks more nearly."""
    origin = [int(Origin.EXACT)] * healed + [CACHED] * (60 - healed) + [FRESH] * 4
    where = scene([CACHED] * 60 + [FRESH] * 4, (0, 60))
    where = replace(where, layout=replace(where.layout, origin=np.array(origin, np.uint8)))
    found = chosen_of(by_score(list(range(60))), where, 0.2)
    assert found == list(range(48 + healed // 10, 60))


@pytest.mark.parametrize("first", range(16, 24))
def test_a_run_of_seven_is_recomputed_whole_wherever_it_stands(first):
    """A number of seven digits, say: with fixed windows it was at two of eight offsets."""
    scores = np.zeros(64)
    scores[first : first + 7] = 1
    method = by_score(scores.tolist(), grouping=Grouping())
    found = chosen_of(method, scene([CACHED] * 64, (0, 64)), 0.25)
    assert set(range(first, first + 7)) <= set(found)
    assert found == list(range(first - 2, first + 9))


def test_scores_spread_to_neighbours():
    where = scene([FRESH, *[CACHED] * 6, FRESH, CACHED, CACHED])
    scores = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.15, 0.1]
    assert chosen_of(by_score(scores), where, 3 / 8) == [4, 8, 9]
    method = by_score(scores, spread=Spread(0.5, within=2.0))
    assert chosen_of(method, where, 3 / 8) == [3, 4, 5]
    placed = dict(zip([1, 2, 3, 4, 5, 6, 8, 9], scores, strict=True))
    plain = [
        own + sum(0.5 * math.exp(-abs(at - by) / 2) * placed[by] for by in placed if by != at)
        for at, own in placed.items()
    ]
    found = choose(method, where, ReuseConfig(recompute_ratio=0.5)).scores
    np.testing.assert_allclose(found, plain, atol=1e-6)


@pytest.mark.parametrize(("share", "within"), [(-0.1, 8.0), (0.1, 0.0), (float("nan"), 8.0)])
def test_a_spread_that_makes_no_sense(share, within):
    with pytest.raises(ConfigError, match="spread"):
        Spread(share, within)


def test_auto_takes_the_smallest_set_that_holds_the_target():
    """80% of the query's attention, by 5 to 40% of the tokens."""
    where, config = scene([CACHED] * 40), ReuseConfig(recompute_ratio="auto")

    def choice_of(*scores):
        rest = (1 - sum(scores)) / (40 - len(scores))
        method = by_score([*scores, *[rest] * (40 - len(scores))], auto="attention")
        return choose(method, where, config)

    choice = choice_of(0.5, 0.2, 0.15)
    assert choice.positions.tolist() == [0, 1, 2]
    assert choice.reason.endswith(
        "hold 80% of the query's attention to them; 7.5% chosen, holding 85%"
    )
    assert choice_of(0.95).positions.tolist() == [0, 1]
    even = choice_of(0.025)
    assert even.positions.tolist() == list(range(16))
    assert even.reason.endswith("40.0% chosen, bounded by 0.05 and 0.4, holding 40%")


def test_auto_needs_a_method_that_looks_at_attention():
    with pytest.raises(ConfigError, match="'query'"):
        method_of(ReuseConfig(method=by_score([1.0, 2.0]), recompute_ratio="auto"))


def test_methods_have_the_names_of_their_files():
    names = "cacheblend cachecraft cacheclip epic full prefix query reuse"
    assert {*names.split()} <= set(method_names())
    assert all(get_method(name).name == name for name in method_names())
    with pytest.raises(UnknownMethodError, match=r"known: .*query"):
        get_method("telepathy")


def test_epic_takes_the_heads_of_later_chunks(make_engine):
    engine = make_engine()
    chunks = some_chunks(3)
    engine.precompute(chunks)
    prompt = [{"role": "user", "content": "\n\n".join(chunks) + "\n\nWhy?"}]
    report = engine.prefill(prompt, method="epic", recompute_ratio=0.1).report
    first, *later = report.chunks
    assert first.recomputed == 0
    for use in later:
        span = report.positions[use.start : use.end]
        known = [origin for origin in span if origin != Origin.FRESH]
        assert use.recomputed > 5
        assert set(known[: use.recomputed]) == {Origin.RECOMPUTED}


def test_cacheclip_recomputes_whole_windows(make_engine, auxiliary):
    engine = make_engine()
    chunks = some_chunks(3)
    loose = replace(get_method("cacheclip"), grouping=Grouping(window=8, threshold=3))
    settings = {"method": loose, "auxiliary_model": auxiliary}
    engine.precompute(chunks, **settings)
    prompt = [{"role": "user", "content": "\n\n".join(chunks) + "\n\nWhy?"}]
    report = engine.prefill(prompt, **settings, recompute_ratio=0.3).report
    assert 0 < report.effective_ratio <= 0.3
    runs = re.findall(rb"\x02+", report.positions)  # of recomputed tokens
    inner = [run for run in runs if b"\x01" + run + b"\x01" in report.positions]
    assert inner
    assert min(map(len, inner)) >= 8  # none is cut off within a chunk


def test_scores_move_over_character_offsets():
    source = np.array([[0, 4], [4, 8], [8, 9]], np.int32)
    target = np.array([[0, 2], [2, 6], [6, 9]], np.int32)
    scores = np.array([1.0, 3.0, 9.0], np.float32)
    mapped = map_scores(scores, source, target)
    np.testing.assert_allclose(mapped, [1.0, 2.0, (3 + 3 + 9) / 3], rtol=1e-6)
    np.testing.assert_allclose(map_scores(scores, source, source), scores, rtol=1e-6)
    gaps = np.array([[0, 1], [5, 6]], np.int32)
    np.testing.assert_allclose(map_scores(scores[:2], gaps, target[:2]), [0.5, 0.75])


@pytest.mark.parametrize("method", ["query", "epic", "cacheblend", "cacheclip"])
def test_tokens_that_are_exact_already_are_never_chosen(make_engine, method):
    engine = make_engine("llama")
    chunks = some_chunks(3)
    engine.precompute(chunks, method=method, auxiliary_model=engine.info.name)
    prompt = [{"role": "user", "content": "\n\n".join(chunks) + "\n\nWhy?"}]
    given = {"method": method, "auxiliary_model": engine.info.name}
    report = engine.prefill(prompt, recompute_ratio=0.9, **given).report
    assert report.chunks[0].recomputed == 0 < report.chunks[1].recomputed
    alone = [{"role": "user", "content": chunks[0] + "\n\nWhy?"}]
    assert engine.prefill(alone, recompute_ratio=0.9, **given).report.tokens.recomputed == 0
    everything = engine.prefill(prompt, recompute_ratio=1, **given).report
    assert everything.tokens.reused == 0
