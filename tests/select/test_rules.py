"""The rules after published methods, each against a plain reference of its own."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny
import torch
from plain_attention import WITHOUT_WINDOW, plain_attention, spy_on
from tiny import UNEVEN, ask, tiny_model
from transformers.cache_utils import DynamicCache

from ragkv import RagKV
from ragkv.attend.observe import (
    LayerCall,
    attention_of_query,
    attention_to_groups,
)
from ragkv.attend.rows import Rows, attend
from ragkv.attend.score_rule import ScoreRule
from ragkv.engine.stream import Prefilled
from ragkv.model.calls import cache_argument
from ragkv.select import Scene, get_method
from ragkv.select.method import FloatArray
from ragkv.splice.layout import Origin
from ragkv.store.version import context_impact

Make = Callable[..., RagKV]
SOFTMAX = ScoreRule(0.4)
SINKS = ScoreRule(0.4, sinks=torch.tensor([3.0, -1.0, 0.0, 2.0, 1.0, 4.0]))
PROMPT = ask(UNEVEN, "\n\nWhat does it say?")
FAMILIES = ["llama", "qwen3", "mistral-window", "gemma3", "gemma2", "gpt-oss"]
"""All have four heads over two KV heads; the last two have windows of 48 tokens."""


@dataclass(slots=True, eq=False)
class Run:
    """One prompt through one rule: the cache as it was spliced and as the rule left it."""

    out: Prefilled
    scores: FloatArray
    cached: npt.NDArray[np.int64]
    chunks: list[npt.NDArray[np.int64]]
    before: tuple[torch.Tensor, torch.Tensor]
    after: tuple[torch.Tensor, torch.Tensor]


def run(make_engine: Make, name: str, family: str = "llama", ratio: Any = 0.3) -> Run:
    engine = make_engine(family)
    engine.precompute(UNEVEN)
    method = get_method(name)
    seen: dict[str, Any] = {}

    def spy(scene: Scene) -> FloatArray:
        seen["before"] = scene.cache.keys.clone(), scene.cache.values.clone()
        seen["scores"] = found = method.score(scene)
        seen["after"] = scene.cache.keys.clone(), scene.cache.values.clone()
        seen["cached"] = scene.layout.cached
        seen["chunks"] = [piece.slots for piece in scene.layout.placed]
        return found

    out = engine.prefill(PROMPT, method=replace(method, score=spy), recompute_ratio=ratio)
    assert len(seen["chunks"]) == len(UNEVEN)
    assert seen["scores"].dtype == np.float32
    assert seen["scores"].shape == seen["cached"].shape
    return Run(out, **seen)


def full_prefill(ids: list[int], family: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values ``[kv_heads, tokens, head_dim]`` of every layer, by transformers."""
    cache = DynamicCache()
    with torch.no_grad():
        model = tiny_model(family)
        model(torch.tensor([ids]), **cache_argument(model, cache))
    return [layer.keys[0] for layer in cache.layers], [layer.values[0] for layer in cache.layers]


def eager_attention(ids: list[int], family: str) -> list[npt.NDArray[np.float32]]:
    """Every layer's weights ``[heads, rows, tokens]`` in a full prefill, by transformers."""
    with torch.no_grad():
        out = tiny_model(family, "eager")(torch.tensor([ids]), output_attentions=True)
    return [weights[0].numpy() for weights in out.attentions]


@pytest.mark.parametrize("family", FAMILIES)
def test_cacheblend_takes_the_largest_differences_to_a_full_prefill_at_layer_1(make_engine, family):
    got = run(make_engine, "cacheblend", family)
    reference = full_prefill(got.out.token_ids, family)
    fresh, cached = reference[1][1], got.before[1][1]
    expected = [
        sum(float(((fresh[head, at] - cached[head, at]) ** 2).sum()) for head in range(len(fresh)))
        for at in got.cached
    ]
    assert max(expected) > 0.1
    np.testing.assert_allclose(got.scores, expected, rtol=1e-3, atol=1e-5)
    chosen = recomputed(got)
    assert len(chosen) == round(0.3 * len(got.cached))
    assert set(got.cached[np.argsort(-got.scores)[: len(chosen)]].tolist()) == chosen
    # layers 0 and 1 are exact for all tokens, and the others as they were
    tokens = len(got.out.token_ids)
    for before, after, full in zip(got.before, got.after, reference, strict=True):
        for layer in (0, 1):
            torch.testing.assert_close(after[layer, :, :tokens], full[layer], atol=2e-5, rtol=1e-4)
        assert not torch.allclose(before[1, :, got.cached], full[1][:, got.cached], atol=1e-2)
        assert torch.equal(before[2:], after[2:])


@pytest.mark.parametrize("name", ["cacheblend", "cachecraft"])
def test_a_model_of_one_layer(make_engine, monkeypatch, name):
    monkeypatch.setitem(tiny.SIZE, "num_hidden_layers", 1)
    got = run(make_engine, name)
    assert np.isfinite(got.scores).all()
    assert got.out.report.tokens.recomputed == round(0.3 * len(got.cached))
    full = full_prefill(got.out.token_ids, "llama")
    for after, reference in zip(got.after, full, strict=True):
        rows = after[0, :, got.cached]
        torch.testing.assert_close(rows, reference[0][:, got.cached], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "layers", "observed"), [*((each, 4, 2) for each in FAMILIES), ("llama", 23, 3)]
)
def test_cachecraft_ranks_entries_by_the_first_layers_attention_to_earlier_chunks(
    make_engine, monkeypatch, family, layers, observed
):
    """Above these no layer runs, and of their CFO nothing is measured: it is 1/2."""
    monkeypatch.setitem(tiny.SIZE, "num_hidden_layers", layers)
    got = run(make_engine, "cachecraft", family)
    paid = plain_inter(got, family, observed)
    for index, (slots, scores) in enumerate(zip(got.chunks, by_chunk(got), strict=True)):
        size = len(slots)
        last = 2.0 if index == 0 else 0.0
        expected = [-rank / size / 0.5 - last for rank in range(size)]
        np.testing.assert_allclose(np.sort(scores)[::-1], expected, rtol=1e-4)
        order = slots[np.argsort(-scores, kind="stable")]
        descending = np.array([paid[at] for at in order])
        assert (np.diff(descending) <= 1e-6).all()
    reference = full_prefill(got.out.token_ids, family)
    for before, after, full in zip(got.before, got.after, reference, strict=True):
        for layer in range(observed):
            rows = after[layer, :, : len(got.out.token_ids)]
            torch.testing.assert_close(rows, full[layer], atol=2e-5, rtol=1e-4)
        assert torch.equal(before[observed:], after[observed:])


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.6, "auto"])
def test_cachecraft_gives_every_entry_the_same_share(make_engine, ratio):
    """With one alpha, ``ceil(alpha / 2 |Ci|)`` tokens of every chunk but one; of auto it is 1."""
    got = run(make_engine, "cachecraft", ratio=ratio)
    paid, chosen = plain_inter(got, "llama", 2), recomputed(got)
    first, *others = ([*slots.tolist()] for slots in got.chunks)
    assert not chosen.intersection(first)
    shares = []
    for slots in others:
        count = len(chosen.intersection(slots))
        assert chosen.issuperset(sorted(slots, key=lambda at: -paid[at])[:count])
        shares.append(((count - 1) / len(slots), count / len(slots)))
    least, most = max(below for below, _ in shares), min(share for _, share in shares)
    assert least < most
    assert ratio != "auto" or least < 0.5 <= most


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_cachecraft_takes_the_first_chunk_last(make_engine, family):
    got = run(make_engine, "cachecraft", family, ratio=0.85)
    chosen = recomputed(got)
    first, *others = [slots.tolist() for slots in got.chunks]
    assert not chosen.intersection(first)  # it is exact: whatever the budget leaves is not spent
    assert all(chosen.issuperset(slots) for slots in others)
    head, *rest = by_chunk(got)
    assert max(head) < min(map(min, rest))


def test_context_impact_of_a_hand_made_example():
    """Two chunks of two tokens and one of one; attention summed over each pair of them."""
    between = np.array([[2.0, 0.0, 0.0], [0.8, 1.2, 0.0], [0.1, 0.3, 0.2]])
    first, second, third = context_impact(between, np.array([2, 2, 1]))
    assert first == 0.5
    assert second == pytest.approx(1 / (1 + math.exp(-(0.8 / 4) / (1.2 / 4))))
    assert third == pytest.approx(1 / (1 + math.exp(-(0.1 / 2 + 0.3 / 2) / 0.2)))
    deaf = context_impact(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([1, 1]))
    assert deaf.tolist() == [0.5, 1.0]


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rows", [range(17), [2, 3, 7, 8, 9, 11, 15]])
def test_attention_sums_go_in_blocks(monkeypatch, window, rows):
    """Six heads over two KV heads, in blocks of four rows, against loops in float64."""
    monkeypatch.setattr("ragkv.attend.observe._ROW_BLOCK", 4)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, len(rows), 8, generator=generator)
    key = torch.randn(1, 2, 17, 8, generator=generator)
    member = (torch.rand(17, 3, generator=generator) > 0.5).float()
    call = LayerCall(0, query, key, key, torch.tensor(list(rows)), window, SOFTMAX)
    paid = np.zeros((len(rows), 17))
    for head in range(6):
        for row, at in enumerate(rows):
            seen = range(0 if window is None else max(0, at - window + 1), at + 1)
            scores = [float(query[0, head, row] @ key[0, head // 3, k]) * 0.4 for k in seen]
            weights = np.exp(scores) / np.exp(scores).sum()
            paid[row, list(seen)] += weights / 6
    np.testing.assert_allclose(attention_to_groups(call, member), paid @ member.numpy(), atol=1e-6)


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rule", [SOFTMAX, ScoreRule(0.4, 1.5), SINKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_asks_for_all_rows_leaves_the_attention_little_to_do(window, dtype, rule):
    """What the query pays serves the attention itself, too: K is read once."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 7, 8, generator=generator).to(dtype)
    key, value = (torch.randn(1, 2, 17, 8, generator=generator).to(dtype) for _ in range(2))
    rows = torch.tensor([2, 3, 7, 8, 9, 11, 15])
    call = LayerCall(0, query, key, value, rows, window, rule)
    with pytest.raises(ValueError, match="no observer has computed"):
        call.attended()
    paid = attention_of_query(call, 3)
    alone = LayerCall(0, query[:, :, 4:], key, value, rows[4:], window, rule)
    assert torch.equal(paid, attention_of_query(alone, 3))
    wide = query.float(), key.float(), value.float()
    expected = attend(*wide, Rows(rows.numpy(), rows), window, rule)
    assert call.attended().dtype == dtype
    torch.testing.assert_close(call.attended(), expected.to(dtype), atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("rule", [SOFTMAX, SINKS])
@pytest.mark.parametrize("window", [None, 5])
def test_a_kernel_sees_what_is_seen_without_it(monkeypatch, window, rule):
    """As on a GPU, with the kernels' twins; where a gradient is required, there is no kernel."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 7, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, 17, 8, generator=generator)
    rows = torch.tensor([2, 3, 7, 8, 9, 11, 15])
    given = query, key, value, rows, window, rule
    expected = attention_of_query(LayerCall(0, *given), 3)
    plain = attend(query, key, value, Rows(rows.numpy(), rows), window, rule)
    monkeypatch.setattr("ragkv.attend.observe.suits_kernels", lambda *_: True)
    call = LayerCall(0, *given)
    torch.testing.assert_close(attention_of_query(call, 3), expected, atol=1e-6, rtol=1e-5)
    assert call.is_computed
    torch.testing.assert_close(call.attended(), plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["mistral-window", "gpt-oss"])
def test_kernels_choose_what_is_chosen_without_them(make_engine, monkeypatch, family):
    expected = run(make_engine, "query", family)
    for room in ("attend.observe", "attend.rows"):
        monkeypatch.setattr(f"ragkv.{room}.suits_kernels", lambda *_: True)
    found = run(make_engine, "query", family)
    assert recomputed(found) == recomputed(expected)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.out.logits, expected.out.logits, atol=1e-5, rtol=1e-4)


def plain_inter(got: Run, family: str, layers: int) -> dict[int, float]:
    """Loops over eager attention: each token's attention to earlier chunks in the first layers."""
    inter = dict.fromkeys(got.cached.tolist(), 0.0)
    for weights in eager_attention(got.out.token_ids, family)[:layers]:
        for index, chunk in enumerate(got.chunks):
            for earlier in got.chunks[:index]:
                for at in chunk.tolist():
                    inter[at] += float(weights[:, at, earlier].mean(0).sum()) / layers
    return inter


def recomputed(got: Run) -> set[int]:
    origin = np.frombuffer(got.out.report.positions, np.uint8)
    return set(np.flatnonzero(origin == Origin.RECOMPUTED).tolist())


def by_chunk(got: Run) -> list[FloatArray]:
    ends = np.cumsum([len(slots) for slots in got.chunks])
    return np.split(got.scores, ends[:-1])


def query_scores(family: str, scene: Scene) -> npt.NDArray[np.float64]:
    last, most = np.zeros((2, len(scene.layout.cached)))
    for at, layer in enumerate(plain_attention(family, scene)):
        if at in (1, 2) and at in WITHOUT_WINDOW.get(family, range(4)):
            heads = layer[:, :, scene.layout.cached]
            last += heads[:, -1].mean(axis=0)
            most += heads.max(axis=1).mean(axis=0)
    return (last / last.sum() + most / most.sum()) / 2


@pytest.mark.parametrize("family", [*FAMILIES, "phi3"])
def test_query_is_scored_in_the_middle_layers_that_see_the_whole_prompt(make_engine, family):
    engine = make_engine(family)
    engine.precompute(UNEVEN)
    method, seen = spy_on(get_method("query"), lambda scene: query_scores(family, scene))
    engine.prefill(PROMPT, method=method, recompute_ratio=0.3)
    expected, scores = seen
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)


def test_a_window_as_long_as_the_prompt_is_none():
    def seeing_all(tokens, layers):
        model: Any = SimpleNamespace(architecture=SimpleNamespace(windows=(48, None, 48, 60)))
        scene: Any = SimpleNamespace(loaded=model, layout=range(tokens))
        return Scene.seeing_all(scene, layers)

    assert seeing_all(48, range(4)) == [0, 1, 2, 3]
    assert seeing_all(49, range(4)) == [1, 3]
    assert seeing_all(61, range(4)) == [1]
    assert seeing_all(61, range(2, 4)) == [2, 3]
