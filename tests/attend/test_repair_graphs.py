"""A prompt's pass as a graph in parts: the rows and logits of the eager pass."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from changed_models import other_attention, other_layer, other_weights
from recording import Recording
from tiny import FAMILIES, ask, some_chunks

from ragkv import RagKV, StoreConfig
from ragkv.attend import graphs
from ragkv.attend.graphs import Graphs, graphs_for
from ragkv.attend.recorder import CudaRecorder
from ragkv.engine import healing
from ragkv.recompute.drift import Drift
from ragkv.store.entry.header import RefusedEntryError
from ragkv.store.entry.lazy import LayerReader

CHUNKS = some_chunks(3)
ORDERS = (CHUNKS, CHUNKS[::-1], CHUNKS[:2], CHUNKS[1:])
QUESTIONS = ("\n\nWhat?", "\n\nWhat does the text say?", "\n\nWhy?", "\n\nWho was it, and when?")
EAGER = ("gemma2", "gpt-oss")
"""Families without captures."""


@pytest.fixture(autouse=True)
def without_sparse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute on a CPU as on a GPU."""
    monkeypatch.setattr("ragkv.recompute.repair.SparseRows", lambda *_: None)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Begin to capture; return the numbers of rows of the passes that graphs compute."""

    def begin() -> list[int]:
        monkeypatch.setitem(graphs.RECORDERS, "cpu", Recording)
        captured, repair = list[int](), Graphs.repair

        def noted(self: Graphs, loaded: Any, subset: Any) -> torch.Tensor | None:
            logits = repair(self, loaded, subset)
            if logits is not None:
                captured.append(len(subset.rows))
            return logits

        monkeypatch.setattr(Graphs, "repair", noted)
        return captured

    return begin


def prefilled(kv: RagKV, **how: Any) -> list[Any]:
    kv.precompute(CHUNKS)
    how = {"recompute_ratio": 0.2, "history": False, **how}
    return [
        kv.prefill(ask(chunks, question), **how)
        for chunks, question in zip(ORDERS, QUESTIONS, strict=True)
    ]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """Compare the logits, and the rows of every layer: drift moves most of them."""
    for one, other in zip(found, expected, strict=True):
        assert one.report.positions == other.report.positions
        torch.testing.assert_close(one.logits, other.logits, atol=5e-5, rtol=1e-4)
        length = one.cache.get_seq_length()
        assert length == other.cache.get_seq_length() == len(one.token_ids)
        for name in ("keys", "values"):
            rows = getattr(one.cache, name)[:, :, :length]
            torch.testing.assert_close(
                rows, getattr(other.cache, name)[:, :, :length], atol=5e-5, rtol=1e-4
            )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_the_rows_of_the_eager_pass(make_engine, record, family):
    expected = prefilled(make_engine(family))
    captured = record()
    kv = make_engine(family)
    found = prefilled(kv)
    assert_equal(found, expected)
    is_captured = family not in EAGER and kv.loaded.architecture.position_limit is None
    assert len(set(captured)) > 1 if is_captured else not captured  # one graph, padded


@pytest.mark.parametrize(
    "how",
    [
        {"recompute_ratio": 0},
        {"recompute_ratio": 1},
        {"method": "epic"},
        {"method": "cacheblend"},
        {"method": "cacheclip"},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_every_method_has_the_rows_of_the_eager_pass(make_engine, record, how):
    expected = prefilled(make_engine(), **how)
    captured = record()
    assert_equal(prefilled(make_engine(), **how), expected)
    assert captured


def test_rows_of_earlier_prompts_are_continued(make_engine, record, monkeypatch):
    monkeypatch.setattr(healing, "ENOUGH", 1 << 30)

    def warm(kv: RagKV) -> list[Any]:
        kv.precompute(CHUNKS)
        for chunks, question in zip(ORDERS, QUESTIONS, strict=True):
            how = {"recompute_ratio": 1, "history": True, "max_new_tokens": 2}
            kv.generate(ask(chunks, question), **how)
        return prefilled(kv, history=True)

    expected = warm(make_engine())
    captured = record()
    found = warm(make_engine())
    assert_equal(found, expected)
    assert min(captured[-4:]) < 16


def test_more_rows_than_the_largest_graphs_stay_eager(make_engine, record, monkeypatch):
    monkeypatch.setattr(graphs, "REPAIR_ROWS", (8, 16))
    captured = record()
    prefilled(make_engine(), recompute_ratio=1)
    assert not captured


def test_memory_that_runs_out_between_two_parts_is_found_again(make_engine, record, monkeypatch):
    """The prompt is computed again, from new rows."""
    expected = prefilled(make_engine())
    captured = record()
    calls, move = list[int](), Drift.__call__

    def lacks(self: Drift, layer: int, *rows: Any) -> None:
        calls.append(layer)
        if len(calls) == 11:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        move(self, layer, *rows)

    monkeypatch.setattr(Drift, "__call__", lacks)
    assert_equal(prefilled(make_engine()), expected)
    assert captured
    assert len(calls) > 11


def test_a_corrupt_layer_is_a_miss(make_engine, record, monkeypatch, tmp_path):
    """Layers are read between the parts of the graph."""
    how: dict[str, Any] = {"recompute_ratio": 0, "on_miss": "skip"}
    kv = make_engine()
    kv.precompute(CHUNKS[1:])
    expected = kv.prefill(ask(CHUNKS), history=False, **how)
    captured = record()
    kv = make_engine(store=StoreConfig(tmp_path, memory_bytes=0))
    prefilled(kv, **how)
    assert captured
    read = LayerReader.read_layer

    def damaged(self: LayerReader, layer: int, out: torch.Tensor) -> None:
        if layer == self.shape[0] - 1 and self._header.text == CHUNKS[0]:
            raise RefusedEntryError("checksum", "the last layer is damaged")
        read(self, layer, out)

    monkeypatch.setattr(LayerReader, "read_layer", damaged)
    found = kv.prefill(ask(CHUNKS), history=False, **how)
    assert [miss.reason for miss in found.report.misses] == ["checksum"]
    assert_equal([found], [expected])


class Adapted(torch.nn.Linear):
    """Computes as a layer of PEFT: the scaling is a number in Python, not a weight."""

    merged_adapters: tuple[str, ...] = ()
    scaling = 1.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * self.scaling


def other_adapter(kv: RagKV) -> None:
    kv.loaded.model.model.layers[0].mlp.up_proj.scaling = 2.0


def adapted(kv: RagKV) -> RagKV:
    layer = kv.loaded.model.model.layers[0].mlp.up_proj
    layer.__class__, kv.loaded.model.peft_config = Adapted, {}
    return kv


@pytest.mark.parametrize(
    "change", [other_weights, other_layer, other_attention, other_adapter], ids=lambda f: f.__name__
)
def test_a_changed_model_is_never_replayed_stale(make_engine, record, change):
    captured = record()
    kv = adapted(make_engine())
    prefilled(kv)
    counted, captures = len(captured), Recording.captured
    assert counted
    with kv.turn():
        change(kv)
    found = prefilled(kv)
    assert len(captured) > counted
    assert Recording.captured > captures or change is other_attention
    plain = adapted(make_engine())
    change(plain)
    known = graphs_for(plain.loaded)
    assert known is not None
    known.repair = lambda *_: None
    assert_equal(found, prefilled(plain))


def test_a_cuda_graph_ends_and_begins_at_each_pause(monkeypatch):
    calls = list[str]()
    cuda = "ragkv.attend.recorder.torch.cuda"

    class Graph:
        def __init__(self) -> None:
            self.number = calls.count("begin")

        def capture_begin(self, **how: Any) -> None:
            assert how["pool"] == "pool"
            calls.append("begin")

        def capture_end(self) -> None:
            calls.append("end")

        def replay(self) -> None:
            calls.append(f"replay {self.number}")

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(f"{cuda}.{name}", lambda *_: None)
    monkeypatch.setattr(f"{cuda}.graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(f"{cuda}.Stream", MagicMock())
    monkeypatch.setattr(f"{cuda}.current_stream", MagicMock())
    monkeypatch.setattr(f"{cuda}.stream", MagicMock())
    monkeypatch.setattr(f"{cuda}.CUDAGraph", Graph)
    recorder = CudaRecorder(torch.device("cuda"))

    def compute() -> torch.Tensor:
        for part in ("first", "second"):
            calls.append("work")
            recorder.pause(partial(calls.append, part))
        return torch.zeros(1)

    replay, _ = recorder.capture(compute)
    work = ["work", "work"]
    assert calls == [*work * 2, "begin", "work", "end", "begin", "work", "end", "begin", "end"]
    calls.clear()
    replay()
    assert calls == ["replay 0", "first", "replay 1", "second", "replay 2"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_in_parts_on_a_gpu():
    device = torch.device("cuda")
    recorder, numbers = CudaRecorder(device), torch.ones(4, device=device)

    def compute() -> torch.Tensor:
        doubled = numbers * 2
        recorder.pause(lambda: doubled.add_(1))
        return doubled * 10

    replay, result = recorder.capture(compute)
    for start in (1.0, 5.0):
        numbers.fill_(start)
        replay()
        assert result.tolist() == [(start * 2 + 1) * 10] * 4
