"""What to_dict() writes, what it leaves out, and what from_dict() makes of it."""

import json

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import MetadataMode
from llama_index.llms.ragkv import RagKVLLM, RagKVPostprocessor, RagKVTransform

from ragkv import ReuseConfig, StoreConfig
from ragkv.errors import ConfigError

NONE = MetadataMode.NONE


@pytest.mark.parametrize(
    "given",
    [
        {"namespace": "tenant"},
        {"store": "secret"},
        {"store": StoreConfig(":memory:")},
        {"reuse": ReuseConfig(recompute_ratio=0.5)},
        {"on_unsupported": "full"},
        {"model_kwargs": {"dtype": "bfloat16"}},
        {"completion_to_prompt": str.upper},
        {"namespace": "tenant", "store": ":memory:"},
    ],
)
def test_what_is_not_written_has_to_be_given_again(folder, tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    llm = RagKVLLM(model_name=folder, max_new_tokens=7, **{"store": ":memory:", **given})
    written = llm.to_dict()
    assert "secret" not in json.dumps(written, default=str)
    names = sorted({"store", *given})
    with pytest.raises(ConfigError, match="give them again") as refused:
        RagKVLLM.from_dict(written)
    assert all(f"{name}=..." in str(refused.value) for name in names)
    again = RagKVLLM.from_dict(written, **{"store": ":memory:", **given})
    assert again.max_new_tokens == 7
    assert (again.kv.namespace, again.kv.reuse) == (llm.kv.namespace, llm.kv.reuse)
    again.kv.close()
    llm.kv.close()


def test_an_llm_of_plain_settings_is_made_again(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    llm = RagKVLLM(model_name=folder, recompute_ratio=0.5, method="epic", sink="Read:")
    again = RagKVLLM.from_json(llm.to_json())
    assert (again.recompute_ratio, again.method, again.sink) == (0.5, "epic", "Read:")
    assert again.model_name == folder
    again.kv.close()
    llm.kv.close()


def test_an_engine_has_to_be_given_again(make_engine):
    kv = make_engine()
    written = RagKVLLM(kv=kv).to_dict()
    with pytest.raises(ConfigError, match="kv="):
        RagKVLLM.from_dict(written)
    assert RagKVLLM.from_dict(written, kv=kv).kv is kv


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (RagKVTransform, {"by_document": True, "expires_in": 60, "metadata_mode": NONE}),
        (RagKVPostprocessor, {"metadata_mode": NONE}),
    ],
)
def test_a_step_needs_its_llm_again(make_engine, kind, fields):
    llm = RagKVLLM(kv=make_engine())
    written = kind(llm=llm, **fields).to_dict()
    with pytest.raises(ConfigError, match="llm="):
        kind.from_dict(written)
    again = kind.from_dict(written, llm=llm)
    assert {name: getattr(again, name) for name in fields} == fields


def test_functions_that_are_set_later_are_heeded(make_engine):
    llm = RagKVLLM(kv=make_engine(), max_new_tokens=2)
    chat = [ChatMessage(content="Say it")]
    before = llm.chat(chat).raw["usage"]["prompt_tokens"]
    llm.completion_to_prompt = lambda prompt: f"<<{prompt}>>"
    wrapped = llm.complete("Say it").raw["usage"]["prompt_tokens"]
    assert wrapped == llm.complete("<<Say it>>", formatted=True).raw["usage"]["prompt_tokens"]
    other = llm.model_copy(update={"messages_to_prompt": lambda _: "Say it"})
    assert other.chat(chat).raw["usage"]["prompt_tokens"] < before
    assert llm.chat(chat).raw["usage"]["prompt_tokens"] == before


def test_what_a_function_writes_is_no_part_of_the_sink(make_engine):
    days = iter(["2026-11-23", "2026-11-24"])
    template = PromptTemplate(
        "Today {date}. Notes: {context_str} {query_str}",
        function_mappings={"date": lambda **_: next(days)},
    )
    llms = [RagKVLLM(kv=make_engine(), sink_from=template) for _ in range(2)]
    assert [llm.sink for llm in llms] == ["Today "] * 2
    listed = PromptTemplate(
        "Notes:\n{context_str}", function_mappings={"context_str": lambda **k: k["context_str"]}
    )
    assert RagKVLLM(kv=make_engine(), sink_from=listed).sink == "Notes:\n"
