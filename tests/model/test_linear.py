"""Passes on a CPU multiply matrices by oneDNN, and nothing else changes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from threads import each_in_a_thread
from tiny import some_chunks, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ragkv.attend.rows import Rows, attend
from ragkv.attend.score_rule import ScoreRule
from ragkv.model import implementation, linear
from ragkv.model.implementation import implementation_for, override_implementation
from ragkv.model.implementation import products as matrix_products
from ragkv.model.linear import fast_linear_layers

WIDTH = 64

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()),
    reason="torch multiplies matrices by another library here",
)


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The processor's properties, changed by tests: one by AMD with AVX-512."""
    found = {"cpu_name": "AMD EPYC"}
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    uncached = implementation._runs_mkl_on.__wrapped__
    monkeypatch.setattr(implementation, "_runs_mkl_on", uncached)
    return found


@pytest.mark.parametrize("name", ["Intel(R) Xeon(R)", "Intel Xeon 2.80GHz", "Unknown", ""])
def test_on_other_processors_onednn_takes_at_most_thin_rows(name, processor):
    rows, thin = torch.randn(64, WIDTH), "onednn" if name.startswith("Intel") else "torch"
    with torch.no_grad():
        assert implementation_for("linear", rows) == "onednn"
        processor["cpu_name"] = name
        found = [implementation_for("linear", rows[:count]) for count in (3, 4, 63, 64)]
        assert found == ["torch", thin, thin, "torch"]
        assert implementation_for("product", rows[None, :32]) == "torch"
        assert implementation_for("attention", rows[None, :32]) == "torch"


@torch.no_grad()
def test_amd_without_avx_512_takes_thin_rows_by_onednn(monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert implementation_for("linear", torch.randn(63, WIDTH)) == "onednn"
    assert implementation_for("linear", torch.randn(64, WIDTH)) == "torch"


def test_an_override_decides_for_any_processor(processor):
    rows = torch.randn(3, WIDTH)
    with torch.no_grad(), override_implementation("torch"):
        assert implementation_for("linear", rows) == "torch"
        with override_implementation("onednn"):
            processor.clear()
            assert implementation_for("attention", rows) == "onednn"
            assert implementation_for("attention", rows.double()) == "torch"
        assert implementation_for("linear", rows) == "torch"


class Products(TorchDispatchMode):
    """Counts the products that go to oneDNN."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one of torch's operators."""
        self.count += "_linear_pointwise" in str(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Products]:
    with torch.no_grad(), Products() as products:
        yield products


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])  # without bias, with, and in one
@pytest.mark.parametrize("shape", [(1, 1, WIDTH), (1, 2, WIDTH), (3, 7, WIDTH), (70, WIDTH)])
def test_products_are_those_of_torch(shape, family):
    model = tiny_model(family)
    rows = torch.randn(shape)
    turned = rows.transpose(0, -2).contiguous().transpose(0, -2)
    layers = [m for m in model.modules() if type(m) is nn.Linear and m.in_features == WIDTH]
    assert layers
    for layer in layers:
        with counted() as products:
            expected = layer(rows)
            assert products.count == 0
            with fast_linear_layers(model):
                found = layer(rows), layer(turned)
            assert products.count == 2
        for one in found:
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)
            assert one.is_contiguous()
        assert "forward" not in layer.__dict__


@pytest.mark.parametrize("case", ["no rows", "turned weights", "float64", "another forward"])
def test_all_else_is_left_to_torch(case):
    model = tiny_model()
    layer: Any = model.get_submodule("model.layers.0.mlp.gate_proj")
    rows = torch.randn(0 if case == "no rows" else 3, WIDTH)
    if case == "turned weights":
        layer.weight.data = layer.weight.data.t().contiguous().t()
    elif case == "float64":
        layer, rows = layer.double(), rows.double()
    elif case == "another forward":
        layer.forward = partial(nn.Linear.forward, layer)
    with counted() as products:
        expected = layer(rows)
        with fast_linear_layers(model):
            found = layer(rows)
    assert products.count == 0
    assert torch.equal(found, expected)


def test_gradients_and_autocast_are_left_to_torch():
    model = tiny_model()
    layer = model.get_submodule("model.layers.0.mlp.gate_proj")
    with fast_linear_layers(model):
        layer(torch.randn(3, WIDTH)).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(3, WIDTH)).dtype == torch.bfloat16
    assert layer.weight.grad is not None


@pytest.mark.parametrize("memory", [0, 1 << 30])
@pytest.mark.parametrize("through_data", [True, False])
def test_packed_weights_are_those_of_now_where_they_fit(monkeypatch, memory, through_data):
    pack, model = Mock(wraps=linear.packed_weight), tiny_model()
    monkeypatch.setattr(linear, "packed_weight", pack)
    monkeypatch.setattr(linear, "total_bytes", lambda _: memory)
    layer, rows = model.get_submodule("model.layers.0.mlp.gate_proj"), torch.randn(7, WIDTH)
    with torch.no_grad():
        for changes in range(1, 3):
            with fast_linear_layers(model):
                found = [layer(rows), layer(rows)]
            torch.testing.assert_close(found, [layer(rows)] * 2, rtol=1e-5, atol=1e-6)
            assert pack.call_count == (changes if memory else 0)
            (layer.weight.data if through_data else layer.weight).mul_(2)


def test_each_thread_has_its_own_block():
    """One gives way in the middle of a pass, another has the model, a third asks without a lock."""
    model = tiny_model()

    def count(block):
        with counted() as products, block:
            model(input_ids=torch.arange(9)[None])
        return products.count

    def interrupt(*_):
        hook.remove()
        blocks = fast_linear_layers(model), nullcontext()
        each_in_a_thread(lambda block: counts.append(count(block)), blocks)

    counts = [count(fast_linear_layers(model))]
    hook = model.get_submodule("model.layers.0").register_forward_pre_hook(interrupt)
    assert count(fast_linear_layers(model)) == max(counts) > 0
    assert sorted(counts) == [0, counts[0], counts[0]]
    assert not any("forward" in vars(module) for module in model.modules())


def test_encoding_and_repair_use_it_and_a_full_prefill_does_not(make_engine):
    kv, chunks = make_engine(), some_chunks()
    prompt = "\n\n".join(chunks) + "\n\nWhat does it say?"
    with Products() as products:
        kv.prefill(prompt, method="full")
        assert products.count == 0
        kv.precompute(chunks)
        encoded = products.count
        assert encoded
        kv.prefill(prompt, recompute_ratio=0.2)
        assert products.count > encoded


@pytest.mark.parametrize(
    ("vectors", "count", "products_made"),
    [("AVX512", 8, 4), ("AVX512", 3, 0), ("AVX2", 8, 0)],  # two for each of the key's heads
)
def test_attention_uses_it_where_that_is_quicker(vectors, count, products_made, monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: vectors)
    places = np.arange(1, 1 + 3 * count, 3)
    query, key = torch.randn(1, 4, count, 8), torch.randn(1, 2, 30, 8)
    with counted() as products:
        found = attend(query, key, key, Rows.on("cpu", places), None, ScoreRule(1.0))
    assert products.count == products_made
    each = key.repeat_interleave(2, 1)
    for row, place in enumerate(places):
        seen = each[:, :, : place + 1]
        expected = torch.softmax(query[:, :, row : row + 1] @ seen.mT, -1) @ seen
        torch.testing.assert_close(found[:, :, row : row + 1], expected)


def test_a_product_that_reads_weights_as_they_lie_is_not_given_turned_ones(monkeypatch):
    """Attention gives it values turned; who took them for contiguous would be wrong silently."""

    def careless(rows, weight, *_):
        return rows @ weight.as_strided(weight.shape, (weight.shape[1], 1)).t()

    rows, others = torch.randn(2, 3, 4), torch.randn(2, 4, 5).transpose(1, 2)
    with torch.no_grad():
        assert implementation_for("attention", rows) == "onednn"
        monkeypatch.setattr(implementation, "_onednn", lambda: careless)
        assert implementation_for("attention", rows) == "torch"
        (found,) = matrix_products(rows, others)
    torch.testing.assert_close(found, rows @ others.transpose(1, 2))
