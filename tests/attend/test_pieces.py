"""Large passes and long chunks go in pieces: the same numbers, and nothing is left behind."""

from typing import Any

import pytest
import torch
from threads import each_in_a_thread
from tiny import FAMILIES, ask, some_chunks
from torch import nn

from ragkv import RagKV
from ragkv.attend import attention
from ragkv.chunk import encode
from ragkv.model.architecture import backbone_of


def widths(kv: RagKV) -> tuple[list[int], list[Any]]:
    """Note the rows of each product with a layer's widest weight."""
    seen: list[int] = []
    layer = backbone_of(kv.loaded.model).layers[0].mlp
    wide = max(
        (m for m in layer.modules() if isinstance(m, nn.Linear)), key=lambda m: m.out_features
    )
    hook = wide.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[-2]))
    return seen, [hook]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ratio", [1.0, 0.4])
def test_pieces_compute_what_the_whole_does(make_engine, family, ratio, monkeypatch):
    kv, chunks = make_engine(family), some_chunks(3)
    kv.precompute(chunks)
    whole = kv.prefill(ask(chunks), recompute_ratio=ratio)
    monkeypatch.setattr(attention, "TOGETHER_CPU", 16)
    pieces = kv.prefill(ask(chunks), recompute_ratio=ratio)
    assert pieces.report.tokens.recomputed == whole.report.tokens.recomputed > 32
    torch.testing.assert_close(pieces.logits, whole.logits, rtol=1e-4, atol=5e-5)
    assert not any("forward" in vars(module) for module in kv.loaded.model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_long_chunks_are_encoded_in_pieces(make_engine, family, monkeypatch):
    chunk = "\n\n".join(some_chunks(2))
    whole, pieces = make_engine(family), make_engine(family)
    whole.precompute([chunk])
    monkeypatch.setattr(encode, "BATCH_TOKENS_CPU", 48)
    seen: list[int] = []
    layer = backbone_of(pieces.loaded.model).layers[0]
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    pieces.precompute([chunk])
    hook.remove()
    assert len(seen) > 3
    assert max(seen) <= 48
    expected, ours = (kv.prefill(ask([chunk]), recompute_ratio=0) for kv in (whole, pieces))
    assert ours.report.tokens.reused == expected.report.tokens.reused > 100
    torch.testing.assert_close(ours.logits, expected.logits, rtol=1e-4, atol=5e-5)


def test_no_more_rows_are_computed_together(make_engine, monkeypatch):
    """In this thread's pass: an ordinary call beside it has all of its rows."""
    kv, chunks = make_engine(), some_chunks(3)
    kv.precompute(chunks)
    monkeypatch.setattr(attention, "TOGETHER_CPU", 16)
    seen, hooks = widths(kv)
    beside: list[int] = []

    def call(_):
        kv.loaded.model(input_ids=torch.arange(40)[None])

    def interrupt(*_):
        hooks.pop().remove()
        before = len(seen)
        each_in_a_thread(call, [0])
        beside.extend(seen[before:])
        del seen[before:]

    hooks.append(backbone_of(kv.loaded.model).layers[0].register_forward_pre_hook(interrupt))
    kv.prefill(ask(chunks), recompute_ratio=1.0)
    assert beside == [40]
    assert max(seen) == 16
    assert sum(seen) > 100


def test_choices_of_a_router_are_not_split(make_engine, monkeypatch):
    """A feed-forward that returns more than rows runs as it is."""
    kv, chunks = make_engine(), some_chunks(3)
    kv.precompute(chunks)
    whole = kv.prefill(ask(chunks), recompute_ratio=1.0)
    monkeypatch.setattr(attention, "TOGETHER_CPU", 16)
    layer: Any = backbone_of(kv.loaded.model).layers[0]
    own, taken = type(layer.mlp).forward, list[int]()

    def routed(self, rows):
        if self is not layer.mlp:
            return own(self, rows)
        taken.append(rows.shape[1])
        return own(self, rows), rows

    monkeypatch.setattr(type(layer.mlp), "forward", routed)
    hook = layer.mlp.register_forward_hook(lambda _, __, out: out[0])
    found = kv.prefill(ask(chunks), recompute_ratio=1.0)
    hook.remove()
    assert taken[0] == 16
    assert taken[1] > 100
    torch.testing.assert_close(found.logits, whole.logits, rtol=1e-4, atol=5e-5)
