"""`ragkv check`: the invariants on a loaded model, and that a broken one is found out."""

import pytest
import torch
from tiny import SIZE, some_chunks, tiny_tokenizer
from transformers import AutoModelForCausalLM, CohereConfig, Olmo2Config, OPTConfig

from ragkv import RagKV
from ragkv.engine.verify import check_model
from ragkv.errors import UnsupportedModelError
from ragkv.model.rotary import RotaryTables


def failing(engine: RagKV) -> set[str]:
    return {row.name for row in check_model(engine.loaded) if not row.holds}


@pytest.mark.parametrize("family", ["llama-yarn", "gemma3", "phi3"])
def test_supported_models_pass(make_engine, family):
    engine = make_engine(family)
    assert failing(engine) == set()
    assert len(check_model(engine.loaded)) == 6


def test_a_wrong_rotary_table_is_found_out(make_engine, monkeypatch):
    engine = make_engine()
    right = RotaryTables.at

    def shifted(self, kind, positions):
        return right(self, kind, positions * 2)

    monkeypatch.setattr(RotaryTables, "at", shifted)
    assert "keys can be moved" in failing(engine)


def test_an_unsupported_model_gets_its_reason():
    config = OPTConfig(
        vocab_size=600, hidden_size=32, num_hidden_layers=1, ffn_dim=32,
        num_attention_heads=2, word_embed_proj_dim=32, max_position_embeddings=128,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with RagKV(model, tiny_tokenizer(), store=":memory:", on_unsupported="full") as engine:
        (row,) = check_model(engine.loaded)
    assert not row.holds
    assert "rotary" in row.detail


def family(kind: str) -> torch.nn.Module:
    """A model of a family that is not in the test suite's matrix."""
    torch.manual_seed(0)
    config = {"olmo2": Olmo2Config, "cohere": CohereConfig}[kind](**SIZE)
    return AutoModelForCausalLM.from_config(config).eval()


def test_an_unknown_family_that_shares_the_mechanisms_simply_works():
    chunks = some_chunks(3)
    with RagKV(family("olmo2"), tiny_tokenizer(), store=":memory:") as engine:
        engine.precompute(chunks)
        out = engine.prefill([{"role": "user", "content": "\n\n".join(chunks) + "\n\nWhy?"}])
        assert out.report.tokens.reused > 100


def test_an_unknown_family_that_rotates_otherwise_is_refused(monkeypatch):
    """Cohere turns neighbouring channels: were that not known, its keys would be moved wrongly."""
    monkeypatch.setattr("ragkv.model.architecture.TURNS", ("halves", "still"))
    with pytest.raises(UnsupportedModelError, match="keys can be moved"):
        RagKV(family("cohere"), tiny_tokenizer(), store=":memory:")
    with RagKV(
        family("cohere"), tiny_tokenizer(), store=":memory:", on_unsupported="full"
    ) as engine:
        assert engine.info.unsupported
        assert engine.generate("Some words", max_new_tokens=2).token_ids
