"""What computing tokens takes, against plain counting."""

import pytest
from tiny import tiny_model, tiny_tokenizer

from ragkv import RagKV, StoreConfig
from ragkv.model.load import load_model
from ragkv.model.loaded import prefill_flops, prefill_flops_of


@pytest.mark.parametrize("windows", [(None, None), (4, None), (4, 1)])
@pytest.mark.parametrize("cached", [0, 3, 4, 50])
@pytest.mark.parametrize("new", [0, 1, 5, 20])
def test_every_query_pays_for_the_keys_that_it_sees(windows, cached, new):
    pairs = 0
    for window in windows:
        for at in range(cached, cached + new):
            pairs += at + 1 if window is None else min(at + 1, window)
    assert prefill_flops(1000, 8, windows, cached, new) == 2 * 1000 * new + 4 * 8 * pairs


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_a_token_pays_for_the_layers_weights_once(family):
    model = tiny_model(family)
    flops = prefill_flops_of(load_model(model, tiny_tokenizer()))
    weights = sum(each.numel() for each in model.get_decoder().layers.parameters())
    assert 0 < flops(0, 1) <= 2.5 * weights
    assert flops(100, 10) > flops(0, 10) > 9 * flops(0, 1)
    is_mixture = hasattr(model.config, "num_experts_per_tok")
    assert (flops(0, 1) < 2 * weights) == is_mixture


def test_the_tree_the_tiers_and_eviction_weigh_by_it(make_engine, tmp_path):
    engine: RagKV = make_engine(store=StoreConfig(tmp_path, disk_bytes=1 << 20))
    expected = prefill_flops_of(engine.loaded)(7, 5)
    store, tree = engine._store, engine._reuse.history._tree
    assert store.tiers
    assert {each._costs(7, 5) for each in (tree, store._eviction, *store.tiers)} == {expected}
