"""RagKVLLM's settings: generate_kwargs, and what is refused before anything is loaded."""

import pytest
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.llms.huggingface import HuggingFaceLLM
from llama_index.llms.ragkv import RagKVLLM
from tiny import some_chunks

from ragkv.errors import ConfigError, ModelNotFoundError, UnknownMethodError

PROMPT = "Context:\n" + "\n\n".join(some_chunks(2)) + "\nWhat is a target?\nAnswer: "
NEUTRAL = [
    {"repetition_penalty": 1.0},
    {"no_repeat_ngram_size": 0},
    {"length_penalty": 1.0, "num_beams": 1, "early_stopping": False},
    {"diversity_penalty": 0.0, "num_beam_groups": 1},
    {"guidance_scale": None, "bad_words_ids": None, "max_time": None},
    {"typical_p": 1.0, "min_p": None, "epsilon_cutoff": 0.0},
    {"use_cache": True, "return_dict_in_generate": False, "num_return_sequences": 1},
    {"pad_token_id": 1, "bos_token_id": 0, "renormalize_logits": True},
]


@pytest.mark.parametrize("given", NEUTRAL)
def test_values_without_effect_change_nothing(make_engine, given):
    kv = make_engine()
    plain = RagKVLLM(kv=kv, max_new_tokens=6).complete(PROMPT).text
    assert RagKVLLM(kv=kv, max_new_tokens=6, generate_kwargs=given).complete(PROMPT).text == plain
    assert RagKVLLM(kv=kv, max_new_tokens=6).complete(PROMPT, **given).text == plain


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 1, "length_penalty": 2.0},
        {"suppress_tokens": list(range(100, 400))},
        {"eos_token_id": list(range(200, 600))},
    ],
)
def test_settings_that_transformers_takes_mean_the_same(make_engine, given):
    kv = make_engine()
    settings = {"max_new_tokens": 12, "context_window": 2000}
    settings["generate_kwargs"] = {"do_sample": False, **given}
    theirs = HuggingFaceLLM(model=kv.loaded.model, tokenizer=kv.tokenizer, **settings)
    ours = RagKVLLM(kv=kv, recompute_ratio=1.0, **settings)
    assert ours.complete(PROMPT).text == theirs.complete(PROMPT).text
    assert ours.complete(PROMPT).text != RagKVLLM(kv=kv, max_new_tokens=12).complete(PROMPT).text


def test_lengths_and_stop_strings(make_engine):
    kv = make_engine()
    whole = RagKVLLM(kv=kv, max_new_tokens=12).complete(PROMPT)
    tokens = whole.additional_kwargs["tokens"]["prompt"]
    short = RagKVLLM(kv=kv, generate_kwargs={"max_length": tokens + 3}).complete(PROMPT)
    assert len(short.raw["token_ids"]) == 3
    stop = whole.text[4:6]
    ended = RagKVLLM(kv=kv, generate_kwargs={"stop_strings": [stop]}).complete(PROMPT)
    assert ended.text == whole.text[: whole.text.index(stop)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recompute_ratio": 7}, "recompute_ratio"),
        ({"method": "best"}, "no method 'best'"),
        ({"sink": 5}, "sink"),
        ({"store": 5}, "store"),
        ({"namespace": 5}, "namespace"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"context_window": 0}, "context_window"),
        ({"device": "nowhere"}, "device"),
        ({"device": "cpu", "device_map": "balanced"}, "give one"),
        ({"stopping_ids": ["x"]}, "stop token"),
        ({"generate_kwargs": {"num_beams": 4}}, "num_beams=4"),
        ({"generate_kwargs": {"temprature": 1.0}}, "did you mean temperature"),
        ({"generate_kwargs": {"repetition_penalty": -1}}, "repetition_penalty"),
    ],
)
def test_wrong_settings_are_refused_before_the_model_is_looked_for(settings, said):
    with pytest.raises((ConfigError, UnknownMethodError), match=said):
        RagKVLLM(model_name="no/such-model", **settings)


def test_a_missing_folder_is_said_to_be_missing(tmp_path):
    with pytest.raises(ModelNotFoundError, match=f"There is no folder {tmp_path}/tiny"):
        RagKVLLM(model_name=f"{tmp_path}/tiny")
    with pytest.raises(ModelNotFoundError, match="There is no folder"):
        RagKVLLM(model_name=f"{tmp_path}/tiny", model_kwargs={"dtype": "float32"})


def test_the_device_and_the_window(folder, make_engine):
    llm = RagKVLLM(model_name=folder, device="cpu", store=":memory:")
    assert llm.kv.loaded.model.device.type == "cpu"
    assert llm.source.device_map == "cpu"
    assert RagKVLLM(model_name=folder, device_map=None, store=":memory:").source.device_map is None
    assert llm.metadata.context_window == 4096 != DEFAULT_CONTEXT_WINDOW
    assert RagKVLLM(kv=make_engine(), context_window=512).metadata.context_window == 512
    llm.kv.close()


def test_unknown_names_are_refused_with_the_nearest(make_engine):
    for name in ("recompute_ration", "ratio"):
        with pytest.raises(ConfigError, match=r"did you mean recompute_ratio\?"):
            RagKVLLM(**{name: 0.1})
        with pytest.raises(ConfigError, match=r"did you mean recompute_ratio\?"):
            RagKVLLM(kv=make_engine()).complete(PROMPT, **{name: 0.1})
    with pytest.raises(ConfigError, match=r"did you mean max_new_tokens\?"):
        RagKVLLM(max_tokens=5)
