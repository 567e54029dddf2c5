"""Both wrappers take every setting by the name that docs/settings.md has for it."""

from dataclasses import fields

import pytest
from frameworks import FRAMEWORKS
from langchain_ragkv import ChatRagKV
from llama_index.llms.ragkv import RagKVLLM

from ragkv import DecodeConfig, ReuseConfig, StoreConfig
from ragkv.config.decode import SparseDecoding
from ragkv.errors import ConfigError

VALUES = {
    "method": "epic",
    "recompute_ratio": 0.5,
    "sink": "Read.",
    "auxiliary_model": None,
    "on_miss": "skip",
    "history": False,
    "calibrated_for": None,
    "max_new_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": "target",
    "seed": 3,
    "top_k": 5,
    "stop_token_ids": [3],
    "drafts": False,
    "sparse": SparseDecoding(),
    "ignore_eos": True,
    "logprobs": 1,
    "json_schema": {"type": "object"},
    "generation": {"min_new_tokens": 2},
    "memory_bytes": 1 << 20,
    "disk_bytes": 1 << 30,
    "read_only": True,
    "device_bytes": 0,
    "codec": "int8",
    "history_bytes": 0,
}
OTHER_NAMES = {"path": "store"}


def names(kind):
    return [each.name for each in fields(kind) if each.name not in OTHER_NAMES]


CALLS = [*names(DecodeConfig), *names(ReuseConfig)]


def test_every_setting_has_a_value_here():
    assert {*CALLS, *names(StoreConfig)} == VALUES.keys()


@pytest.fixture
def asked(monkeypatch, folder):
    """Return ``asked(llm)``: what the engine is given by an answer."""

    def asked(llm, framework):
        given = {}

        class StopHereError(Exception):
            pass

        def record(*_, **arguments):
            given.update(arguments)
            raise StopHereError

        for name in ("generate", "stream"):
            monkeypatch.setattr(llm.kv, name, record)
        with pytest.raises(StopHereError):
            framework.text(llm, "What?")
        return given

    return asked


@pytest.mark.parametrize("name", CALLS)
def test_settings_of_calls(make_engine, asked, framework, name, folder):
    kv = make_engine()
    of_models = {"auxiliary_model": folder, "calibrated_for": kv.info.fingerprint}
    value = of_models.get(name, VALUES[name])
    llm = framework.kind(kv=kv, **framework.form, **{"temperature": 0.5, name: value})
    found = asked(llm, framework)[name]
    expected = (value,) if name == "stop" else tuple(value) if name == "stop_token_ids" else value
    assert (tuple(found) if name == "stop_token_ids" else found) == expected


@pytest.mark.parametrize("name", names(StoreConfig))
@pytest.mark.parametrize("whole", [False, True], ids=["folder", "StoreConfig"])
def test_settings_of_the_store(folder, framework, tmp_path, name, whole):
    store = StoreConfig(tmp_path / "store") if whole else tmp_path / "store"
    FRAMEWORKS["langchain"].make(name=folder, store=store).kv.close()  # there to be read
    llm = framework.make(name=folder, store=store, **{name: VALUES[name]})
    source = llm.store if hasattr(llm, "store") else llm.source.store
    assert getattr(source, name) == VALUES[name]
    assert source.path == tmp_path / "store"
    llm.kv.close()


@pytest.mark.parametrize("kind", [ChatRagKV, RagKVLLM])
@pytest.mark.parametrize("name", [*CALLS, *names(StoreConfig)])
def test_a_wrong_name_leads_to_the_right_one(kind, name):
    with pytest.raises((ConfigError, ValueError), match=rf"did you mean {name}\?"):
        kind(**{f"{name}x": VALUES[name]})


@pytest.mark.parametrize("kind", [ChatRagKV, RagKVLLM])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"on_miss": "never"}, "on_miss must be one of"),
        ({"history": "no"}, "history must be True or False"),
        ({"codec": "int2"}, "codec must be one of"),
        ({"sparse": "some"}, "sparse"),
    ],
)
def test_a_wrong_value_is_said_before_the_model_is_loaded(kind, given, said):
    with pytest.raises((ConfigError, ValueError), match=said):
        kind(**given)


@pytest.mark.parametrize("kind", [ChatRagKV, RagKVLLM])
def test_a_given_engine_has_its_store_s_settings(make_engine, kind):
    with pytest.raises((ConfigError, ValueError), match="store"):
        kind(kv=make_engine(), codec="int8")


def test_precomputing_and_answering_have_the_same_settings(make_engine, framework):
    llm = framework.make(kv=make_engine(reuse=ReuseConfig()), sink="Read this.", on_miss="skip")
    framework.rag(llm, "What?")
    assert llm.kv.reuse.sink == "auto"
    assert llm.last_report.tokens.reused > 0


def test_one_sink_is_given_once(make_engine):
    with pytest.raises(ValueError, match=r"sink and sink_from .*: give one of them"):
        ChatRagKV(kv=make_engine(), sink="Read this.", sink_from="{context_str}")


def test_settings_survive_a_dict(folder):
    llm = RagKVLLM(model_name=folder, store=":memory:", history=False, drafts=False, top_k=3)
    again = RagKVLLM.from_dict(llm.to_dict(), store=":memory:")
    assert again.settings == llm.settings == {"history": False, "drafts": False, "top_k": 3}
    assert again.kv.reuse.history is False
    for each in (llm, again):
        each.kv.close()


def test_settings_survive_langchain_s_copies(make_engine, asked):
    llm = ChatRagKV(kv=make_engine(), history=False, sink="Read this.", drafts=False)
    for copy in (llm.model_copy(), llm.with_config(tags=["a"]).bound, ChatRagKV(**dict(llm))):
        given = asked(copy, FRAMEWORKS["langchain"])
        assert (given["history"], given["sink"], given["drafts"]) == (False, "Read this.", False)
