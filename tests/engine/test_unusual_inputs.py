"""Tokenizers, models and calls that are right, and that few others have."""

import copy
from typing import Any

import pytest
import tiny
import torch
from tiny import some_chunks, tiny_model, tiny_tokenizer
from transformers import (
    ByT5Tokenizer,
    GraniteConfig,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from ragkv import RagKV, ReuseConfig
from ragkv.answer.pieces import TextPieces
from ragkv.errors import ConfigError
from ragkv.model.calls import cache_argument
from ragkv.model.fingerprint import fingerprint_of
from ragkv.store import TieredStore

CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does the text say?"}]


def served(*given: Any, **more: Any) -> RagKV:
    return RagKV(*given, store=":memory:", **more)


def far(kv: RagKV, found: Any) -> float:
    """How far logits are from a full prefill's, in standard deviations."""
    with torch.no_grad():
        full = kv.loaded.model(torch.tensor([found.token_ids])).logits[0, -1]
    return float((found.logits - full).abs().max() / full.std())


@pytest.mark.parametrize("family", ["granite", "qwen2"])
def test_a_bos_that_the_tokenizer_does_not_add_is_no_sink(monkeypatch, family):
    monkeypatch.setitem(tiny.FAMILIES, "granite", (GraniteConfig, {}))
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    kv = served(tiny_model(family), tokenizer)
    assert tokenizer.bos_token
    kv.precompute(CHUNKS[:1])
    found = kv.prefill(CHUNKS[0] + "\n\nWhat?", recompute_ratio=0.0)
    assert found.report.tokens.reused > 50
    assert far(kv, found) < 1e-3


def test_a_model_of_few_positions_passes_its_check(monkeypatch):
    few = (GraniteConfig, {"max_position_embeddings": 512})
    monkeypatch.setitem(tiny.FAMILIES, "granite", few)
    assert not served(tiny_model("granite"), tiny_tokenizer()).info.unsupported


def test_a_slow_tokenizer_is_served_in_full():
    model = tiny_model()
    model.generation_config.suppress_tokens = list(range(200, 600))  # those are no bytes
    kv = served(model, ByT5Tokenizer(), on_unsupported="full")
    answer = kv.generate("hello world", max_new_tokens=3, logprobs=1)
    ids = torch.tensor([kv.tokenizer("hello world")["input_ids"]])
    expected = kv.loaded.model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert answer.token_ids == expected.tolist()
    assert len(answer.text_logprobs) == 3
    assert answer.report.tokens.prompt == ids.shape[1]


def test_an_encoder_and_a_decoder_are_served_in_full():
    config = T5Config(
        vocab_size=600,
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=1,
        pad_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    kv = served(T5ForConditionalGeneration(config), tiny_tokenizer(), on_unsupported="full")
    prompt = "what is the if statement"
    ids = torch.tensor([kv.tokenizer(prompt)["input_ids"]])
    expected = kv.loaded.model.generate(ids, max_new_tokens=8, do_sample=False)[0, 1:].tolist()
    assert kv.generate(prompt, max_new_tokens=8).token_ids == expected
    assert len(expected) > 4


def test_a_rope_that_grows_has_no_last_position(monkeypatch):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = {"max_position_embeddings": 64, "rope_parameters": rope}
    monkeypatch.setitem(tiny.FAMILIES, "grows", (LlamaConfig, config))
    kv = served(tiny_model("grows"), tiny_tokenizer(), on_unsupported="full")
    assert len(kv.generate(PROMPT, max_new_tokens=4).token_ids) == 4


@pytest.mark.parametrize("method", ["query", "full"])
@pytest.mark.parametrize("steps", [2, 30])
def test_a_prompt_can_be_continued_in_any_mode(make_engine, monkeypatch, method, steps):
    """With gradients on, and outside the inference mode that it was prefilled in."""
    monkeypatch.setattr("ragkv.splice.buffer._MOST_SPARE_ROWS", 20)  # the buffer grows
    engine = make_engine()
    engine.precompute(CHUNKS, method=method)
    outcomes, model = [], engine.loaded.model
    for made, run in (
        (torch.no_grad, torch.no_grad),
        (torch.inference_mode, torch.no_grad),
        (torch.inference_mode, torch.enable_grad),
        (torch.no_grad, torch.inference_mode),
    ):
        with made():
            found = engine.prefill(PROMPT, method=method)
        with run():
            for _ in range(steps):
                out = model(torch.tensor([[5]]), **cache_argument(model, found.cache))
        outcomes.append(out.logits.detach().clone())
    for other in outcomes[1:]:
        torch.testing.assert_close(other, outcomes[0], atol=1e-4, rtol=1e-4)


def test_a_rotary_table_that_changes_is_another_model(make_engine):
    engine = make_engine()
    plain = engine.info.fingerprint
    engine.precompute(CHUNKS)
    rotary = engine.loaded.model.model.rotary_emb
    rotary.inv_freq.div_(4.0)  # position interpolation by hand
    assert engine.info.fingerprint != plain
    found = engine.prefill(PROMPT, recompute_ratio=1.0)
    assert far(engine, found) < 1e-3
    assert not found.report.tokens.reused
    engine.precompute(CHUNKS)
    assert far(engine, engine.prefill(PROMPT, recompute_ratio=1.0)) < 1e-3
    rotary.inv_freq.mul_(4.0)
    assert engine.info.fingerprint == plain
    engine.loaded.model.model.rotary_emb = copy.deepcopy(rotary)
    engine.loaded.model.model.rotary_emb.inv_freq.div_(2.0)
    engine.precompute(CHUNKS)
    assert engine.info.fingerprint != plain
    found = engine.prefill(PROMPT, recompute_ratio=1.0)
    assert found.report.tokens.recomputed
    assert far(engine, found) < 1e-3


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tables_are_those_of_the_configuration(family):
    """No family's fingerprint has numbers that may differ in the last bit from device to device."""
    model = tiny_model(family)
    before = fingerprint_of(model, tiny_tokenizer()).attention
    rotary = model.model.rotary_emb
    for name, buffer in list(rotary.named_buffers()):
        setattr(rotary, name, buffer * (1 + 1e-6))
    assert fingerprint_of(model, tiny_tokenizer()).attention == before


def test_a_profile_is_compared_with_the_model_as_it_is(make_engine, monkeypatch):
    engine = make_engine()
    of_before = ReuseConfig(calibrated_for=engine.info.fingerprint)
    with torch.no_grad():
        engine.loaded.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    closed: list[object] = []
    close = TieredStore.close

    def noted(store):
        closed.append(store)
        close(store)

    monkeypatch.setattr(TieredStore, "close", noted)
    with pytest.raises(ConfigError, match="calibrated for another model"):
        served(engine.loaded, reuse=of_before)
    assert closed
    served(engine.loaded, reuse=ReuseConfig(calibrated_for=engine.info.fingerprint))


def test_a_template_may_name_the_dates_format():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    today = "Today {{ strftime_now(format='%d %b %Y') }}\n{% for m"
    tokenizer.chat_template = tiny.CHAT_TEMPLATE.replace("{% for m", today, 1)
    kv = served(tiny_model(), tokenizer)
    assert kv.precompute(CHUNKS).new == 3
    assert kv.prefill(PROMPT).report.tokens.reused


def test_pieces_are_the_text_behind_many_special_tokens():
    tokenizer = tiny_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    words = tokenizer(" the if statement" * 40)["input_ids"][:60]
    ids = [*words, *[end] * 12, *tokenizer(" if the if")["input_ids"]]

    class Shortening(type(tokenizer)):
        """Writes no space before its first word, as SentencePiece's decoders do."""

        def decode(self, *given, **more):
            return str(super().decode(*given, **more)).removeprefix(" ")

    shortening = Shortening(tokenizer_object=tokenizer.backend_tokenizer)
    shortening.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    pieces = TextPieces(shortening, ())
    assert "".join(map(pieces.feed, ids)) + pieces.finish() == pieces.text()
