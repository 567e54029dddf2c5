"""What recomputed rows see in the upper layers: against plain loops, and in whole passes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pairwise import all_pairs
from tiny import UNEVEN, ask

from ragkv import Prefilled, RagKV
from ragkv.attend.rows import Rows
from ragkv.attend.score_rule import ScoreRule
from ragkv.attend.sparse_rows import SparseRows
from ragkv.errors import ConfigError
from ragkv.select import Method, Sparse, get_method
from ragkv.splice.layout import Layout, Origin, Placed

PROMPT = ask(UNEVEN, "\n\nWhat does it say?")
LOADED = SimpleNamespace(
    architecture=SimpleNamespace(layers=10), device=torch.device("cpu"), dtype=torch.float32
)

SINK, CACHED, FRESH = Origin.SINK, Origin.CACHED, Origin.FRESH
PLAN = [SINK] * 3 + [CACHED] * 40 + [FRESH] * 2 + [CACHED] * 90 + [FRESH] + [CACHED] * 30
PLAN += [FRESH] * 7
CHUNK_SLOTS = [range(3, 43), range(45, 135), range(136, 166)]


def layout(exact: int) -> Layout:
    """A sink, three chunks with a gap between, a query."""
    placed = tuple(
        Placed(
            SimpleNamespace(text=""),
            np.arange(len(slots)),
            np.array(slots),
            slots[0],
            slots[-1] + 1,
        )
        for slots in CHUNK_SLOTS
    )
    ids = np.arange(len(PLAN))
    return Layout(ids, np.stack([ids, ids + 1], axis=1), 3, placed, np.array(PLAN, np.uint8), exact)


def sees(row: int, key: int, rows: set[int], exact: int, near: int) -> bool:
    """Say whether a row sees a key, in the words of the docstrings."""
    if key > row:
        return False
    if PLAN[row] != CACHED or PLAN[key] != CACHED or key in rows or key < exact:
        return True
    chunk = next(slots for slots in CHUNK_SLOTS if row in slots)
    return key in chunk and row - key <= near


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize(
    ("exact", "near", "share"),
    all_pairs([3, 43], [0, 1, 5, 200], [0.02, 0.2, 0.7]),
)
def test_rows_see_exactly_what_is_said(exact, near, share, monkeypatch):
    monkeypatch.setattr("ragkv.attend.rows._ROW_BLOCK_CPU", 16)
    torch.manual_seed(0)
    candidates = [at for at, origin in enumerate(PLAN) if origin == CACHED and at >= exact]
    chosen = np.random.default_rng(1).permutation(candidates)[: int(share * len(candidates))]
    rows = np.union1d(chosen, np.flatnonzero(np.array(PLAN) == FRESH))
    ours = SparseRows(layout(exact), rows, Sparse(0.5, near), LOADED)
    assert ours.first_layer == 5
    query = torch.randn(1, 6, len(rows), 8)
    key, value = torch.randn(2, 1, 2, len(PLAN), 8)
    for _ in range(2):  # nothing is left over from one layer in the next
        out = ours.attend(query, key, value, ScoreRule(8**-0.5), layer=5, rows=Rows.on("cpu", rows))
        computed = set(rows.tolist())
        for index, row in enumerate(rows.tolist()):
            seen = [j for j in range(len(PLAN)) if sees(row, j, computed, exact, near)]
            for head in range(6):
                scores = key[0, head // 3, seen].double() @ query[0, head, index].double()
                weights = torch.softmax(scores * 8**-0.5, dim=0)
                expected = weights @ value[0, head // 3, seen].double()
                torch.testing.assert_close(
                    out[0, head, index].double(), expected, atol=1e-5, rtol=1e-5
                )
        key, value = key.flip(3), value.flip(3)


def run(engine: RagKV, sparse: Sparse | None, ratio: float = 0.3) -> Prefilled:
    method = replace(get_method("query"), drift=False, sparse=sparse)
    return engine.prefill(PROMPT, method=method, recompute_ratio=ratio)


def layers_that_differ(one: Prefilled, other: Prefilled) -> list[int]:
    pairs = enumerate(zip(one.cache.layers, other.cache.layers, strict=True))
    return [n for n, (a, b) in pairs if not torch.equal(a.keys, b.keys)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_only_the_upper_layers_see_less(make_engine, family):
    engine = make_engine(family)
    layers = engine.loaded.model.config.num_hidden_layers
    engine.precompute(UNEVEN)
    whole = run(engine, None)
    for first in range(layers):
        part = run(engine, Sparse(first / layers, near=2))
        # a layer's attention first shows in the next layer's keys; the last has the last row alone
        assert layers_that_differ(whole, part) == list(range(first + 1, layers))
    everything = run(engine, Sparse(1.0, near=0))
    assert torch.equal(whole.logits, everything.logits)


def test_layers_with_a_window_keep_it(make_engine):
    engine = make_engine("mistral-window")
    engine.precompute(UNEVEN)
    assert torch.equal(run(engine, None).logits, run(engine, Sparse(0.0, near=0)).logits)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_with_all_recomputed_it_is_a_full_prefill(make_engine, family):
    engine = make_engine(family)
    engine.precompute(UNEVEN)
    full = engine.prefill(PROMPT, method="full")
    for method in (get_method("query"), replace(get_method("query"), sparse=Sparse(0.0, near=0))):
        ours = engine.prefill(PROMPT, method=method, recompute_ratio=1)
        torch.testing.assert_close(ours.logits, full.logits, atol=1e-4, rtol=1e-4)


def test_generate_and_prefill_see_alike(make_engine):
    engine = make_engine()
    engine.precompute(UNEVEN)
    method: Method = replace(get_method("query"), sparse=Sparse(0.0, near=0))
    for ratio in (0.1, 0.5):
        logits = engine.prefill(PROMPT, method=method, recompute_ratio=ratio).logits
        answer = engine.generate(PROMPT, method=method, recompute_ratio=ratio, max_new_tokens=1)
        assert answer.token_ids == [int(logits.argmax())]


def test_a_share_names_its_layer():
    plan, rows = layout(3), np.array([50, len(PLAN) - 1])
    for layers in range(1, 64):
        loaded = SimpleNamespace(
            architecture=SimpleNamespace(layers=layers), device=LOADED.device, dtype=LOADED.dtype
        )
        for first in range(layers + 1):
            made = SparseRows(plan, rows, Sparse(first / layers, 1), loaded)
            assert made.first_layer == first


@pytest.mark.parametrize(("after", "near"), [(-0.1, 1), (1.1, 1), (float("nan"), 1), (0.5, -1)])
def test_nonsense_is_refused(after, near):
    with pytest.raises(ConfigError, match="share of the layers"):
        Sparse(after, near)
