"""What keys and values depend on is in the fingerprint; what a tokenizer was told is not in a prompt."""

import pytest
import torch
from exact import assert_exact
from tiny import SIZE, some_chunks, tiny_model, tiny_tokenizer
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig

from ragkv import RagKV
from ragkv.config import DecodeConfig
from ragkv.errors import ConfigError
from ragkv.model.fingerprint import fingerprint_of
from ragkv.prompt.render import Rendered
from ragkv.prompt.tokens import tokenize


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (LlamaConfig, {"hidden_act": "gelu"}),
        (LlamaConfig, {"rms_norm_eps": 1e-2}),
        (GraniteConfig, {"attention_multiplier": 0.1}),
        (GraniteConfig, {"residual_multiplier": 0.5}),
        (GraniteConfig, {"embedding_multiplier": 3.0}),
    ],
    ids=str,
)
def test_what_changes_keys_and_values_changes_the_fingerprint(kind, change):
    models = [AutoModelForCausalLM.from_config(kind(**{**SIZE, **more})) for more in ({}, change)]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = (fingerprint_of(model, tiny_tokenizer()) for model in models)
    assert ours.weights == theirs.weights
    assert ours.digest != theirs.digest


def test_what_changes_nothing_keeps_the_fingerprint(tmp_path):
    model = tiny_model(attention="eager")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    again.config.use_cache = False
    found = [fingerprint_of(each, tiny_tokenizer()).digest for each in (model, again)]
    assert found[0] == found[1]


@pytest.mark.parametrize("told", ["enable_truncation", "enable_padding"])
def test_what_another_thread_told_the_tokenizer_is_not_heeded(told, monkeypatch):
    """transformers keeps it in the tokenizer, where a call of another thread can meet it."""
    tokenizer = tiny_tokenizer()
    text = Rendered(" ".join(some_chunks(1)), add_special_tokens=True)
    expected = tokenize(text, tokenizer)
    raw = tokenizer.backend_tokenizer
    monkeypatch.setattr(tokenizer, "set_truncation_and_padding", lambda **_: None)
    try:
        if told == "enable_truncation":
            raw.enable_truncation(max_length=8)
        else:
            raw.enable_padding(length=500)
        assert len(tokenizer(text.text)["input_ids"]) != len(expected)
        found = tokenize(text, tokenizer)
    finally:
        raw.no_truncation()
        raw.no_padding()
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.offsets.tolist() == expected.offsets.tolist()


def test_stop_tokens_may_come_from_a_generator(make_engine):
    engine = make_engine()
    first = engine.generate("Words", max_new_tokens=6).token_ids[0]
    stops = (token for token in [first])
    assert len(engine.generate("Words", max_new_tokens=6, stop_token_ids=stops).token_ids) == 1
    with pytest.raises(ConfigError, match="stop_token_ids must be a list"):
        DecodeConfig(stop_token_ids=b"ab")


def test_a_whole_number_is_a_temperature(make_engine):
    settings = {"top_p": 1, "seed": 1, "max_new_tokens": 4}
    engine = make_engine()
    assert (
        engine.generate("Words", temperature=2, **settings).token_ids
        == engine.generate("Words", temperature=2.0, **settings).token_ids
    )


def test_weights_that_wrap_other_tensors_are_told_apart():
    """As torchao's do: numbers and scales are tensors inside of one."""
    digests = set()
    for half in (None, 0, 1):
        model = tiny_model()
        layer = model.get_submodule("model.layers.0.mlp.gate_proj")
        parts = [layer.weight.detach().clone() for _ in range(2)]
        if half is not None:
            parts[half][0, 0] += 1
        layer.weight = torch.nn.Parameter(TwoTensor(*parts), requires_grad=False)
        digests.add(fingerprint_of(model, tiny_tokenizer()).weights)
    assert len(digests) == 3


def test_torchaos_weights_are_reused_exactly(make_engine):
    torchao = pytest.importorskip("torchao.quantization")
    model = tiny_model()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        assert_exact(engine)
        assert engine.info.fingerprint != make_engine().info.fingerprint
