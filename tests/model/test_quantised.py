"""Products with the weights of a quantised file: near float32's, in passes and steps alone."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from grids import GRIDS, on_a_grid, quantised_model
from threads import each_in_a_thread
from tiny import some_chunks, tiny_model, tiny_tokenizer
from torch import nn
from transformers import PreTrainedModel

from ragkv import RagKV
from ragkv.attend.forward import SubsetPass, joint_forward
from ragkv.decode.prefill import rounding_kl
from ragkv.engine.verify import check_model
from ragkv.model import implementation, linear, pass_layer, quantised
from ragkv.model.implementation import (
    has_bfloat16_products,
    has_int4_products,
    has_quantised_products,
    override_implementation,
)
from ragkv.model.linear import arithmetic_of, fast_linear_layers, in_float32, rounds_products
from ragkv.model.lock import lock_of
from ragkv.model.quantised import QuantisedWeight, int4_rows, is_quantised, joint_int4

needs_products = pytest.mark.skipif(
    not has_quantised_products(), reason="this CPU has no such products"
)


@pytest.mark.parametrize("kind", GRIDS)
def test_weights_of_a_file_are_known_by_their_grid(kind):
    assert is_quantised(on_a_grid(kind))


@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_other_weights_are_not(saved_as, seed):
    torch.manual_seed(seed)
    weight = torch.randn(64, 96).to(saved_as).float()
    assert not is_quantised(weight)
    assert not is_quantised(torch.full_like(weight, 0.3))
    assert not is_quantised(on_a_grid("Q4_1")[:, :-1])  # no whole groups
    assert not is_quantised(on_a_grid("Q4_1").roll(1, 1) + weight / 100)
    with_adapter = on_a_grid("Q4_1") + weight / 200  # merged in place
    assert not is_quantised(with_adapter)
    assert QuantisedWeight(with_adapter).int4 is None


@needs_products
@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 4), (9,), (70,)])
@pytest.mark.parametrize("out", [64, 40])  # torch packs rows of 16
@torch.no_grad()
def test_products_are_float32s_rounded(kind, shape, out):
    weight, rows, bias = on_a_grid(kind, out), torch.randn(*shape, 96), torch.randn(out)
    expected = nn.functional.linear(rows, weight, bias)
    found = QuantisedWeight(weight).product(rows, bias)
    if found is None:
        assert not has_bfloat16_products()
        return
    assert found.dtype == torch.float32
    scale = (rows.abs() @ weight.abs().t()) / 128
    assert ((found - expected).abs() <= scale + expected.abs() / 128).all()


needs_int4 = pytest.mark.skipif(not has_int4_products(), reason="this CPU has no such products")


@needs_int4
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
@torch.no_grad()
def test_levels_are_exact_whatever_levels_a_group_has(kind):
    """A group without its grid's least or greatest level gets a grid of fewer levels."""
    weight = on_a_grid(kind, 64, 3200)
    weight[0, :32], weight[1, :32] = 0.5, 0
    if kind != "Q8_0":  # its groups are known by their largest number
        ends = weight[2, :32].quantile(torch.tensor([0.3, 0.8]), interpolation="nearest")
        weight[2, :32] = weight[2, :32].clamp(*ends)
    bits: Any = 4 if kind in {"Q4_0", "Q4_1"} else 8
    found = quantised._levels(weight, quantised._GRIDS[bits])
    assert found is not None
    levels, low, step = (part.float() for part in found)
    assert ((levels >= 0) & (levels < 1 << bits)).all()
    again = levels.view(64, -1, 32) * step[..., None] + low[..., None]
    torch.testing.assert_close(again.view_as(weight), weight)
    if bits == 8:
        halves, middle, step = quantised._halves(*found)
        assert (halves < 16).all()
        again = (halves.float().view(64, -1, 32) - 8) * step[..., None] + middle[..., None]
        torch.testing.assert_close(again.view(64, 2, -1).sum(1), weight)
        high, high_step = middle[3:, :100], step[3:, :100]  # symmetric: their level 8 is nearly 0
        assert (high.abs() < high_step / 100).all()


@needs_int4
@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0", "Q6_K"])
def test_more_levels_are_not_packed_in_4_bits(kind):
    assert quantised._int4_weight(on_a_grid(kind), 4) is None
    assert (quantised._int4_weight(on_a_grid(kind), 8) is None) == (kind == "Q6_K")
    almost = on_a_grid("Q4_1", 64, 3200)
    almost[63, 3199] += 0.03
    assert quantised._int4_weight(almost, 4) is None


@needs_int4
@torch.no_grad()
@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_1"), ("Q5_0", "Q8_0"), ("Q4_0", "Q8_0")])
def test_weights_of_several_types_are_multiplied_together(kinds, monkeypatch):
    weight = torch.cat([on_a_grid(kind) for kind in kinds])
    monkeypatch.setattr(quantised, "has_bfloat16_products", lambda: False)
    whole = QuantisedWeight(weight).int4
    monkeypatch.setattr(quantised, "_BLOCK", 1)
    int4 = QuantisedWeight(weight).int4
    assert whole is not None
    assert int4 is not None
    assert int4.parts == (1 if kinds == ("Q4_0", "Q4_1") else 2)
    rows = torch.randn(16, 96)
    found = int4.product(rows, None)
    assert torch.equal(found, whole.product(rows, None))
    off = (found - rows @ weight.t()).abs()
    assert (off <= (rows.abs() @ weight.abs().t()) / 128).all()
    for vectors, most in (("AVX512", 8), ("AVX2", 4)):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda each=vectors: each)
        assert int4.most_rows == (16 if int4.parts == 1 else most)


@needs_int4
@torch.no_grad()
@pytest.mark.parametrize(
    "kinds", [("Q4_0", "Q4_1"), ("Q5_0", "Q8_0"), ("Q4_0", "Q8_0"), ("Q8_0", "Q6_K")]
)
@pytest.mark.parametrize("outputs", [64, 80])
def test_a_joint_weight_equals_its_parts(kinds, outputs, monkeypatch):
    monkeypatch.setattr(quantised, "has_bfloat16_products", lambda: False)
    parts = [QuantisedWeight(on_a_grid(kind, outputs, 96)) for kind in kinds]
    joint = joint_int4(parts)
    if "Q6_K" in kinds:
        assert joint is None
        return
    packed = parts[0].int4, parts[1].int4
    assert joint is not None
    rows = torch.randn(joint.most_rows, 96)
    found = torch.cat([each.product(rows, None) for each in packed if each is not None], dim=1)
    off = 0.05 if kinds == ("Q4_0", "Q8_0") else 0
    torch.testing.assert_close(joint.product(rows, None), found, atol=off, rtol=off)
    assert joint_int4(parts[:1]) is packed[0]


@needs_int4
def test_8_bits_are_packed_only_without_bfloat16_products(monkeypatch):
    for has in (False, True):
        monkeypatch.setattr(quantised, "has_bfloat16_products", lambda has=has: has)
        assert (QuantisedWeight(on_a_grid("Q8_0")).int4 is None) == has


Make = Callable[..., RagKV]


@pytest.fixture
def engine() -> RagKV:
    return RagKV(quantised_model(), tiny_tokenizer(), store=":memory:")


@needs_products
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_pass_and_a_full_prefill_compute_the_same(family):
    """With all tokens recomputed; the same prompt has the same answer again."""
    chunks = some_chunks()
    prompt = "\n\n".join(chunks) + "\n\nWhat does it say?"
    with RagKV(quantised_model(family), tiny_tokenizer(), store=":memory:") as kv:
        kv.precompute(chunks)
        full, repaired = kv.prefill(prompt, method="full"), kv.prefill(prompt, recompute_ratio=1)
        assert repaired.report.tokens.recomputed > 50
        off = (full.logits - repaired.logits).abs().max() / full.logits.std()
        assert off < 0.1
        answers = [
            kv.generate(prompt, method="full", max_new_tokens=8, ignore_eos=True) for _ in range(2)
        ]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[0].report.dtype == "float32, quantised products"
        assert full.report.dtype == "float32, quantised products"


@needs_products
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_the_largest_logits_are_float32s(kind, rows):
    """Rounded logits of 32 and more are 0.25 apart: equal ones have a wrong order."""
    model, hidden = quantised_model(kind=kind), []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: hidden.append(given[0]))
    with torch.no_grad(), lock_of(model), fast_linear_layers(model):
        logits = model(input_ids=torch.arange(rows)[None]).logits[0]
    hook.remove()
    expected = nn.functional.linear(hidden[0][0], head.weight)
    largest = expected.topk(8).indices
    torch.testing.assert_close(logits.gather(1, largest), expected.gather(1, largest))
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    if rounds_products(model) and has_bfloat16_products():
        assert not torch.allclose(logits, expected, rtol=1e-4)


@needs_products
def test_float32_is_had_by_asking_for_it(engine):
    prompt = "What?"
    ids = torch.tensor([engine.tokenize(prompt)])
    assert ids.shape[1] <= int4_rows()  # more rows are float32's on a CPU without bfloat16 products
    model = quantised_model()
    with RagKV(model, tiny_tokenizer(), store=":memory:", dtype="float32") as kv:
        found = kv.prefill(prompt, method="full")
        assert found.report.dtype == "float32"
        assert rounding_kl(kv.loaded, np.arange(9, dtype=np.int32)) == 0
    with torch.no_grad():
        assert torch.equal(found.logits, model(input_ids=ids, logits_to_keep=1).logits[0, -1])
    with engine:
        rounded = engine.prefill(prompt, method="full")
    assert not torch.equal(found.logits, rounded.logits)


@needs_products
def test_the_first_answer_copies_no_weights_after_a_warm_up(engine, monkeypatch):
    copied = []

    def record(name):
        own = getattr(quantised, name)

        def call(weight, *bits):
            copied.append(name)
            return own(weight, *bits)

        monkeypatch.setattr(quantised, name, call)

    record("_int4_weight")
    record("packed_weight")
    with engine:
        engine.warm_up()
        assert copied
        copied.clear()
        engine.generate("What does it say? " * 20, max_new_tokens=4, ignore_eos=True)
    assert not copied


@needs_products
def test_ordinary_calls_beside_a_pass_are_float32s():
    model, ids = quantised_model(), torch.arange(int4_rows())[None]
    beside = [torch.zeros(1)]

    def call(_):
        with torch.no_grad():
            beside[0] = model(input_ids=ids).logits

    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with fast_linear_layers(model):
            each_in_a_thread(call, beside)
            assert torch.equal(beside[0], expected)
            assert not torch.equal(model(input_ids=ids).logits, expected)
            with override_implementation("torch"):
                assert torch.equal(model(input_ids=ids).logits, expected)
        assert torch.equal(model(input_ids=ids).logits, expected)


@needs_products
def test_copies_are_those_of_the_weights_of_now_where_they_fit(monkeypatch):
    model, rows = quantised_model(), torch.randn(3, 64)
    layer = model.get_submodule("model.layers.0.mlp.gate_proj")
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        for _ in range(2):
            with fast_linear_layers(model):
                found = layer(rows)
            off = (found - layer(rows)).abs().max()
            assert 0 < off < 0.02 * layer(rows).abs().max()
            layer.weight.mul_(2)
        monkeypatch.setattr(linear, "total_bytes", lambda _: 1 << 10)
        layer.weight.mul_(2)
        with fast_linear_layers(model):
            torch.testing.assert_close(layer(rows), nn.Linear.forward(layer, rows))
        assert arithmetic_of(model) == "float32"


@needs_products
def test_without_onednn_passes_are_float32s(monkeypatch):
    """It can be turned off in torch at any time."""
    weight, rows = QuantisedWeight(on_a_grid("Q8_0")), torch.randn(9, 96)
    monkeypatch.setattr(implementation, "_onednn", lambda: None)
    with torch.no_grad():
        assert weight.product(rows, None) is None


def test_a_cpu_without_such_products_says_float32(monkeypatch):
    monkeypatch.setattr(linear, "has_quantised_products", lambda: False)
    model = quantised_model()
    with torch.no_grad(), fast_linear_layers(model):
        assert arithmetic_of(model) == "float32"


@needs_products
def test_the_check_says_how_near_they_are(engine):
    with engine:
        rows = check_model(engine.loaded)
    assert [row.name for row in rows][-1] == "quantised products = float32 products"
    assert rows[-1].detail.startswith("KL ")
    assert all(row.holds for row in rows[:-1])


def rows_again(model: Any, rows: int, chunks: list[str]) -> torch.Tensor:
    """Compute a prompt's last rows again behind a float32 prefill, as a step or a repair does."""
    head = model.get_output_embeddings()
    head.weight.data = head.weight.data.roll(1, 1) + 0.01 * on_a_grid("Q8_0", *head.weight.shape)
    assert not is_quantised(head.weight)  # rounded logits are 0.03 of a standard deviation apart
    with RagKV(model, tiny_tokenizer(), store=":memory:") as kv, lock_of(model):
        with in_float32(model):
            kv.precompute(chunks)
            cache = kv.prefill(" ".join(chunks)).cache
        ids = np.array(kv.tokenize(" ".join(chunks)))
        places = np.arange(len(ids) - rows, len(ids))
        return joint_forward(kv.loaded, [SubsetPass(ids, places, cache, keep=rows)])[0]


def bytes_model(family: str) -> PreTrainedModel:
    """A tiny model whose weights have 8 bits."""
    return quantised_model(family, "Q8_0")


def like_transformers(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose layers have hooks, so that passes do not replace them."""
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("make", [tiny_model, quantised_model, bytes_model])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_steps_are_those_of_transformers_layers(family, make, rows, monkeypatch):
    monkeypatch.setattr(pass_layer, "_tables", tables := Mock(wraps=pass_layer._tables))
    found = rows_again(make(family), rows, some_chunks())
    assert (calls := tables.call_count)
    expected = rows_again(like_transformers(make(family)), rows, some_chunks())
    assert tables.call_count == calls
    assert (found - expected).abs().max() < 0.03 * expected.std()


@needs_products
@pytest.mark.parametrize("make", [quantised_model, bytes_model])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_passes_round_no_more_than_transformers_layers(family, make, monkeypatch):
    with in_float32(exact := make(family)):
        expected = rows_again(exact, 40, some_chunks())
    found = rows_again(make(family), 40, some_chunks())
    of_layers = rows_again(like_transformers(make(family)), 40, some_chunks())
    rounding = (of_layers - expected).square().mean()
    assert (found - expected).square().mean() <= 1.2 * rounding
    assert torch.equal(found, of_layers) != has_bfloat16_products()
