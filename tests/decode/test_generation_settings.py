"""transformers' generation settings: taken, without effect, or refused by name."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny import some_chunks
from transformers import GenerationConfig

from ragkv.config.generation import GENERATION, PASSED_ON, engine_arguments, refuse_unsupported
from ragkv.errors import ConfigError

PROMPT = "Read:\n" + "\n\n".join(some_chunks(2)) + "\nWhat is a target?"
UNUSUAL = {
    "num_beams": 4,
    "num_return_sequences": 2,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "encoder_repetition_penalty": 1.2,
    "output_scores": True,
    "return_dict_in_generate": True,
    "cache_implementation": "quantized",
    "max_time": 3.0,
    "sequence_bias": [[[1], 2.0]],
}


def test_every_name_of_transformers_is_known():
    """A newer transformers may have more: they belong into the table, too."""
    assert set(vars(GenerationConfig())) <= GENERATION


def test_transformers_defaults_change_nothing():
    usual = GenerationConfig._get_default_generation_params()
    usual.pop("max_length")
    found, unsupported = engine_arguments(usual, None)
    assert not unsupported
    assert engine_arguments(dict.fromkeys(GENERATION), None) == ({"temperature": 0.0}, {})
    assert found["temperature"] == 0.0


def test_neutral_values_change_no_answer(make_engine):
    kv = make_engine()
    usual = engine_arguments(GenerationConfig._get_default_generation_params(), None)[0]
    plain = kv.generate(PROMPT, max_new_tokens=12).token_ids
    usual["generation"].pop("max_length")
    assert kv.generate(PROMPT, max_new_tokens=12, **usual).token_ids == plain


@pytest.mark.parametrize(("name", "value"), UNUSUAL.items())
def test_what_is_not_supported_is_named(name, value):
    _, unsupported = engine_arguments({name: value}, None)
    with pytest.raises(ConfigError, match=rf"does not support {name}=.*omit it"):
        refuse_unsupported(unsupported)


def test_what_the_model_s_own_configuration_says_is_no_change():
    own = SimpleNamespace(guidance_scale=1.5, num_beams=4)
    assert not engine_arguments({"guidance_scale": 1.5}, own)[1]
    assert engine_arguments({"guidance_scale": 1.0}, own)[1], "neutral, and another than its own"
    assert engine_arguments({"num_beams": 4}, own)[1], "ragkv does without the model's beams"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("temprature", "temperature"),
        ("repetition_penality", "repetition_penalty"),
        ("stops", "stop"),
    ],
)
def test_a_misspelt_setting_is_told_its_neighbour(wrong, meant):
    _, unsupported = engine_arguments({wrong: 1.0}, None)
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        refuse_unsupported(unsupported, others=("stop",))


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(100, 400))},
        {"begin_suppress_tokens": list(range(500))},
        {"bad_words_ids": [[token] for token in range(200, 400)]},
        {"min_new_tokens": 5, "eos_token_id": list(range(100, 600))},
        {"eos_token_id": list(range(200, 600))},
        {"max_length": 300},
    ],
)
def test_answers_are_those_of_transformers(make_engine, settings):
    kv = make_engine()
    ids = kv.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    most = {} if "max_length" in settings else {"max_new_tokens": 12}
    with torch.no_grad():
        out = kv.loaded.model.generate(ids, do_sample=False, **most, **settings)
    arguments, _ = engine_arguments({**settings, **most}, kv.loaded.model.generation_config)
    answer = kv.generate(PROMPT, **arguments)
    assert answer.token_ids == out[0, ids.shape[1] :].tolist()
    assert answer.token_ids != kv.generate(PROMPT, **most).token_ids


def test_a_setting_takes_the_place_of_the_model_s_own(make_engine):
    kv = make_engine()
    plain = kv.generate(PROMPT, max_new_tokens=12).token_ids
    own = kv.loaded.model.generation_config
    kv.loaded.model.generation_config = copy.deepcopy(own)
    kv.loaded.model.generation_config.repetition_penalty = 1.5
    assert kv.generate(PROMPT, max_new_tokens=12).token_ids != plain
    neutral = {"repetition_penalty": 1.0}
    assert kv.generate(PROMPT, max_new_tokens=12, generation=neutral).token_ids == plain


@pytest.mark.parametrize(
    "narrow", [{"min_p": 1.0}, {"top_h": 1e-6}, {"typical_p": 1e-6, "top_k": 1}]
)
def test_settings_of_sampling(make_engine, narrow):
    kv = make_engine()
    given, _ = engine_arguments({"do_sample": True, "temperature": 5.0, **narrow}, None)
    greedy = kv.generate(PROMPT, max_new_tokens=8)
    assert kv.generate(PROMPT, max_new_tokens=8, seed=1, **given).token_ids == greedy.token_ids
    given, _ = engine_arguments(narrow, None)
    assert kv.generate(PROMPT, max_new_tokens=8, **given).token_ids == greedy.token_ids


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": "1"},
        {"min_p": 2},
        {"no_repeat_ngram_size": -1},
        {"min_new_tokens": 9},
        {"suppress_tokens": 5},
        {"suppress_tokens": ["a"]},
        {"bad_words_ids": [[]]},
        {"bad_words_ids": [[10**6]]},
        {"suppress_tokens": list(range(600))},
        {"num_beams": 4},
        {"no_such": 1},
    ],
)
def test_wrong_values_are_configuration_errors(make_engine, wrong):
    name = next(iter(wrong))
    with pytest.raises(ConfigError, match=name):
        make_engine().generate(PROMPT, max_new_tokens=5, generation=wrong)


def test_the_documented_names_are_those_that_are_passed_on():
    from ragkv import DecodeConfig

    assert all(f"``{name}``" in (DecodeConfig.__doc__ or "") for name in PASSED_ON)
