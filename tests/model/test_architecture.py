"""Models as they are in the wild: configurations that say too much, parts of larger models."""

from typing import Any

import pytest
import torch
from exact import assert_exact
from tiny import LONGROPE, SIZE, VOCAB, random_model, some_chunks, tiny_tokenizer
from transformers import (
    Gemma3Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PersimmonConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    RwkvConfig,
    StableLmConfig,
)

from ragkv import RagKV, StoreConfig
from ragkv.config import MEMORY
from ragkv.errors import ConfigError, PromptTooLongError, UnsupportedModelError
from ragkv.model.calls import cache_argument

QUESTION = "\n\nWhat does the text say?"
TOLERANCE = 5e-5


def reading_images(**text: Any) -> PreTrainedModel:
    window = {"sliding_window": 48, "query_pre_attn_scalar": 16}
    eyes = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    kinds = ["sliding_attention", "full_attention"] * 2
    return random_model(
        Gemma3Config(
            text_config={**SIZE, **window, "layer_types": kinds, **text}, vision_config=eyes
        )
    )


def test_a_model_that_reads_images_too():
    with RagKV(reading_images(), tiny_tokenizer(), store=":memory:") as engine:
        assert not engine.info.unsupported
        assert engine.loaded.architecture.windows == (48, None, 48, None)
        assert_exact(engine)


def test_images_are_not_left_out_without_a_word():
    parts = [{"type": "image", "url": "picture.png"}, {"type": "text", "text": "What is this?"}]
    with (
        RagKV(reading_images(), tiny_tokenizer(), store=":memory:") as engine,
        pytest.raises(ConfigError, match="'image' is not read"),
    ):
        engine.generate([{"role": "user", "content": parts}])


def test_its_positions_are_those_of_its_text_part():
    small = reading_images(max_position_embeddings=16)
    with (
        RagKV(small, tiny_tokenizer(), store=":memory:", on_unsupported="full") as engine,
        pytest.raises(PromptTooLongError, match="16 positions"),
    ):
        engine.prefill(some_chunks(1)[0])


def persimmon(**more: Any) -> PreTrainedModel:
    size = {name: SIZE[name] for name in SIZE if name not in ("num_key_value_heads", "head_dim")}
    return random_model(PersimmonConfig(**{**size, **more}))


def test_heads_that_are_not_grouped():
    with RagKV(persimmon(), tiny_tokenizer(), store=":memory:") as engine:
        assert engine.loaded.architecture.kv_heads == 4
        assert_exact(engine)


def test_layers_that_do_not_hand_on_what_their_model_is_called_with():
    anew = StoreConfig(MEMORY, history_bytes=0)  # prompts are asked twice
    with RagKV(random_model(StableLmConfig(**SIZE)), tiny_tokenizer(), store=anew) as engine:
        assert_exact(engine)
        prompt = "\n\n".join(some_chunks(3)) + QUESTION
        assert engine.prefill(prompt, recompute_ratio=0.2).report.tokens.recomputed > 20


def test_a_model_on_which_the_check_fails_with_an_error_is_refused():
    odd = persimmon(num_key_value_heads=2)  # the model has 4
    with pytest.raises(UnsupportedModelError, match="RuntimeError"):
        RagKV(odd, tiny_tokenizer(), store=":memory:")
    with RagKV(odd, tiny_tokenizer(), store=":memory:", on_unsupported="full") as engine:
        assert engine.info.unsupported
        assert len(engine.generate("Some words", max_new_tokens=3).token_ids) == 3


@pytest.mark.parametrize(
    ("config", "said", "window"),
    [
        (LlamaConfig, {"sliding_window": 4096}, None),  # as many as it has positions
        (MistralConfig, {"use_sliding_window": False}, 48),
        (Phi3Config, {"use_sliding_window": False}, 48),
    ],
)
def test_windows_are_those_that_the_model_attends_within(config, said, window):
    """transformers' own classes pass over what their configurations say besides."""
    model = random_model(config(**{**SIZE, "sliding_window": 48, **said}))
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        assert set(engine.loaded.architecture.windows) == {window}
        assert_exact(engine)


def test_a_window_that_no_layer_of_the_family_has_is_refused():
    """Its attention passes over it, and transformers' cache, while decoding, does not."""
    model = random_model(LlamaConfig(**SIZE, sliding_window=48))
    with pytest.raises(UnsupportedModelError, match="a window of 48 tokens"):
        RagKV(model, tiny_tokenizer(), store=":memory:")
    model.config.sliding_window = None
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        assert_exact(engine)


def test_a_window_that_a_layer_does_not_have_is_found_out():
    """As in code of a model's own that reads its configuration in another way."""
    model = random_model(MistralConfig(**SIZE, sliding_window=48))
    model.config.sliding_window = 40
    engine = RagKV(model, tiny_tokenizer(), store=":memory:")
    model.config.sliding_window = 48
    with engine, pytest.raises(UnsupportedModelError, match=r"window of 48, but .* has 40"):
        assert_exact(engine)


def test_a_chunk_beyond_longropes_switch_is_cut_there():
    """What a batch is padded to would switch the table for shorter chunks as well."""
    model = random_model(LlamaConfig(**{**SIZE, "rope_parameters": LONGROPE}))
    short, *more = some_chunks(9)
    long = " ".join(more)
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        engine.precompute([short, long])
        for text in (short, long[:400]):
            prompt = [{"role": "user", "content": text + QUESTION}]
            out = engine.prefill(prompt, recompute_ratio=0.0)
            assert out.report.tokens.reused > 80
            with torch.no_grad():
                full = model(torch.tensor([out.token_ids])).logits[0, -1].float()
            assert float((out.logits - full).abs().max()) < TOLERANCE
        beyond = engine.prefill([{"role": "user", "content": long + QUESTION}])
        assert {miss.reason for miss in beyond.report.misses} == {"positions"}


def in_full(config: PreTrainedConfig) -> RagKV:
    return RagKV(random_model(config), tiny_tokenizer(), store=":memory:", on_unsupported="full")


def test_recurrent_models_give_the_state_that_they_keep():
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)
    with in_full(config) as engine:
        out = engine.prefill("Some words to go on")
        ids = torch.tensor([out.token_ids])
        with torch.no_grad():
            full = engine.loaded.model(ids).logits[0, -1]
            over = cache_argument(engine.loaded.model, out.cache)
            more = engine.loaded.model(ids[:, :1], use_cache=True, **over).logits[0, -1]
            both = engine.loaded.model(torch.cat([ids, ids[:, :1]], dim=1)).logits[0, -1]
        torch.testing.assert_close(out.logits, full, atol=1e-5, rtol=0)
        torch.testing.assert_close(more, both, atol=1e-5, rtol=0)


def test_a_state_that_is_no_cache_is_not_passed_off_as_one():
    config = RwkvConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16
    )
    with in_full(config) as engine:
        with pytest.raises(UnsupportedModelError, match="generate"):
            engine.prefill("Some words to go on")
        assert len(engine.generate("Some words to go on", max_new_tokens=3).token_ids) == 3


def test_weights_on_several_devices_are_refused_by_name():
    model = random_model(LlamaConfig(**SIZE))
    model.model.layers[2].to("meta")
    with pytest.raises(UnsupportedModelError, match="weights on cpu and meta"):
        RagKV(model, tiny_tokenizer(), store=":memory:")
    with RagKV(model, tiny_tokenizer(), store=":memory:", on_unsupported="full") as engine:
        assert "several" in engine.info.unsupported or "meta" in engine.info.unsupported


def test_the_fingerprint_is_that_of_the_model_as_it_is_now():
    with RagKV(random_model(LlamaConfig(**SIZE)), tiny_tokenizer(), store=":memory:") as engine:
        before = engine.info.fingerprint
        assert before == engine.loaded.fingerprint.digest
        with torch.no_grad():
            engine.loaded.model.model.layers[1].mlp.up_proj.weight.add_(0.5)
        assert engine.info.fingerprint not in (None, before)
        engine.loaded.model.train()  # a cache of answers may still ask
        assert engine.info.fingerprint not in (None, before)


def test_attention_of_another_name_is_found():
    """GPT-NeoX calls it ``attention``, and computes its feed-forward beside it."""
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=2048,
        pad_token_id=1,
    )
    with RagKV(random_model(config), tiny_tokenizer(), store=":memory:") as engine:
        assert not engine.info.unsupported
        assert_exact(engine)
