"""What both models refuse before anything is loaded, and transformers' settings."""

import pytest
from langchain_ragkv import ChatRagKV, RagKVLLM

from ragkv.errors import ConfigError, ModelNotFoundError, UnknownMethodError

MAKERS = {
    "fields": lambda name, **given: ChatRagKV(model_id=name, **given),
    "from_model_id": ChatRagKV.from_model_id,
    "sampling": lambda name, **given: ChatRagKV.from_model_id(name, do_sample=True, **given),
    "llm": lambda name, **given: RagKVLLM.from_model_id(name, task="text-generation", **given),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recompute_ratio": 7}, "recompute_ratio"),
        ({"method": "best"}, "no method 'best'"),
        ({"namespace": 5}, "namespace"),
    ],
)
def test_wrong_settings_are_refused_before_the_model_is_looked_for(maker, settings, said):
    with pytest.raises((ConfigError, UnknownMethodError, ValueError), match=said):
        MAKERS[maker]("no/such-model", **settings)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_missing_folder_is_said_to_be_missing(maker, tmp_path):
    with pytest.raises(ModelNotFoundError, match=f"There is no folder {tmp_path}/tiny"):
        MAKERS[maker](f"{tmp_path}/tiny")


def test_a_chat_model_takes_transformers_settings(folder):
    answers = []
    for given in (
        {},
        {"repetition_penalty": 1.0, "num_beams": 1, "length_penalty": 1.0},
        {"suppress_tokens": list(range(100, 400))},
    ):
        keywords = {"max_new_tokens": 12, **given}
        model = ChatRagKV.from_model_id(folder, store=":memory:", pipeline_kwargs=keywords)
        answers.append(model.invoke("What is a target, and what is none?").content)
        model.kv.close()
    plain, neutral, suppressed = answers
    assert plain == neutral != suppressed
    with pytest.raises(ConfigError, match="guidance_scale"):
        ChatRagKV.from_model_id(folder, pipeline_kwargs={"guidance_scale": 1.5})
