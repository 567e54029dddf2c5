"""Families that turn their keys otherwise than Llama: found out when they are loaded."""

from typing import Any

import pytest
import tiny
import torch
from exact import assert_exact, reference
from tiny import SIZE, ask, random_model, some_chunks, tiny_tokenizer
from transformers import (
    Cohere2Config,
    CohereConfig,
    Exaone4Config,
    Glm4Config,
    LlamaConfig,
    LlamaForCausalLM,
    NanoChatConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SmolLM3Config,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from ragkv import RagKV, StoreConfig
from ragkv.errors import UnsupportedModelError
from ragkv.model.calls import cache_in
from ragkv.model.load import load_model
from ragkv.select import method_names

WINDOW = {"sliding_window": 48}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], set[str]]] = {
    "cohere": (CohereConfig, {}, {"adjacent"}),
    "glm4": (Glm4Config, {"partial_rotary_factor": 0.5}, {"adjacent"}),
    "cohere2": (Cohere2Config, WINDOW, {"adjacent", "still"}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 1, 0, 1]}, {"halves", "still"}),
    "exaone4": (Exaone4Config, WINDOW, {"halves", "still"}),
    "nanochat": (NanoChatConfig, {}, {"backwards"}),
}


def made(family: str) -> PreTrainedModel:
    kind, more, _ = FAMILIES[family]
    return random_model(kind(**{**SIZE, **more}))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_is_usual_is_found_out_too(family, monkeypatch):
    model = tiny.tiny_model(family)
    listed = load_model(model, tiny_tokenizer())
    monkeypatch.setattr("ragkv.model.load.is_verified", lambda _: False)
    found = load_model(model, tiny_tokenizer())
    assert (found.architecture, found.fingerprint) == (listed.architecture, listed.fingerprint)


def test_another_idea_of_how_keys_turn_is_another_fingerprint(monkeypatch):
    """Entries keep keys turned back: those turned back otherwise must not be found."""
    found = load_model(made("cohere"), tiny_tokenizer())
    monkeypatch.setattr("ragkv.model.architecture.TURNS", ("halves",))
    other = load_model(made("cohere"), tiny_tokenizer())
    assert found.fingerprint.weights == other.fingerprint.weights
    assert found.fingerprint.digest != other.fingerprint.digest


def test_an_auxiliary_model_is_examined_too(tmp_path):
    """Its chunks are in the same store, where the model may be an engine's own later."""
    made("cohere").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    chunks, store = some_chunks(2), tmp_path / "store"
    with RagKV(tiny.tiny_model(), tiny_tokenizer(), store=store) as engine:
        engine.precompute(chunks, method="cacheclip", auxiliary_model=str(tmp_path / "model"))
    with RagKV(tmp_path / "model", store=store) as engine:
        assert engine.precompute(chunks).existing == 2
        assert_exact(engine, in_deviations=2e-4)


class ScaledKeys(LlamaForCausalLM):
    """As remote code may be: of a listed type, with attention of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = _ScaledAttention


class _ScaledAttention(LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, **given: Any) -> Any:
        positions = given["position_ids"] if "position_ids" in given else torch.zeros(1, 1)
        scale = 1 + 0.01 * positions[..., None].to(hidden_states.dtype)
        return super().forward(hidden_states * scale, **given)


def test_code_that_is_not_transformers_own_is_examined_whatever_its_type():
    torch.manual_seed(0)
    model = ScaledKeys(LlamaConfig(**SIZE)).eval()
    with pytest.raises(UnsupportedModelError, match="keys can be moved"):
        RagKV(model, tiny_tokenizer(), store=":memory:")


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_are_moved_exactly(family, tmp_path):
    """Ratio 1, and one chunk behind the sink, are what the model itself gives."""
    with RagKV(made(family), tiny_tokenizer(), store=tmp_path) as engine:
        assert {kind.turn for kind in engine.loaded.architecture.rope_kinds} == FAMILIES[family][2]
        engine.precompute(some_chunks(3))
    with RagKV(made(family), tiny_tokenizer(), store=tmp_path) as engine:
        assert_exact(engine, in_deviations=2e-4)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("cohere2", name) for name in method_names() if "clip" not in name),
        *(("smollm3", name) for name in ("query", "cachecraft")),
    ],
)
def test_every_method_runs_and_repairs(family, method):
    chunks = some_chunks(3)
    with RagKV(made(family), tiny_tokenizer(), store=":memory:") as engine:
        engine.precompute(chunks, method=method)
        out = engine.prefill(ask(chunks), method=method, recompute_ratio=0.3)
        assert torch.isfinite(out.logits).all()
        full = reference(engine, out.token_ids)
        whole = engine.prefill(ask(chunks), method=method, recompute_ratio=1.0)
        assert float((whole.logits - full).abs().max() / full.std()) < 2e-4


@pytest.mark.parametrize("family", ["cohere", "glm4"])
def test_layer_zero_keys_are_those_of_the_place_where_they_are_put(family, tmp_path):
    """They depend on token and position alone: the model's own cache is the reference."""
    chunks = some_chunks(3)
    store = StoreConfig(path=tmp_path, memory_bytes=0)
    with RagKV(made(family), tiny_tokenizer(), store=store) as engine:
        engine.precompute(chunks)
        out = engine.prefill(ask(chunks), method="reuse")
        with torch.no_grad():
            cache = cache_in(engine.loaded.model(torch.tensor([out.token_ids]), use_cache=True))
        keys = out.cache.layer(0)[0][:, : len(out.token_ids)]
        torch.testing.assert_close(keys, cache.layers[0].keys[0], atol=2e-5, rtol=1e-4)
