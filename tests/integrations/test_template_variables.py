"""Variables of the chat template reach every prompt, and the sinks of prompts that have them."""

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_ragkv import ChatRagKV
from listening import listening
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.ragkv import RagKVLLM
from pydantic import ValidationError
from tiny import some_chunks, tiny_tokenizer

from ragkv import Chat, RagKV, ReuseConfig
from ragkv.client import RemoteRagKV
from ragkv.errors import ConfigError

HEAD = "{% if effort is defined %}<|im_start|>system\nEffort: {{ effort }}.<|im_end|>\n{% endif %}"
ASKED = "What is a target list?"
MESSAGES = [{"role": "user", "content": ASKED}]
HIGH, LOW = ({"chat_template_kwargs": {"effort": effort}} for effort in ("high", "low"))
WRONG = {"chat_template_kwargs": {"tools": []}}
CHUNKS = some_chunks(2)


@pytest.fixture
def kv(make_engine, monkeypatch) -> RagKV:
    engine = make_engine()
    template = HEAD + tiny_tokenizer().chat_template
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    return engine


@pytest.fixture
def size(kv):
    """Return a function that counts the tokens of a prompt with these variables."""

    def count(**given) -> int:
        text = kv.render(MESSAGES, **given)
        return len(kv.tokenizer(text, add_special_tokens=False)["input_ids"])

    assert len({count(), count(**HIGH), count(**LOW)}) > 1
    return count


@pytest.mark.parametrize("served", [False, True])
def test_the_core(kv, size, served):
    if served:
        with listening(kv) as url, RemoteRagKV(url) as remote:
            check_core(remote, size)
    else:
        check_core(kv, size)


def check_core(kv, size):
    for given in ({}, HIGH, LOW):
        answer = kv.generate(MESSAGES, max_new_tokens=2, **given)
        assert answer.report.tokens.prompt == size(**given)
        chat = Chat(MESSAGES, **given)
        assert kv.generate(chat, max_new_tokens=2).report.tokens.prompt == size(**given)
        over = kv.generate(chat, max_new_tokens=2, **LOW).report.tokens.prompt
        assert over == size(**LOW)
    for wrong in (WRONG, {"chat_template_kwargs": 5}):
        with pytest.raises(ConfigError, match="chat_template_kwargs"):
            kv.generate(MESSAGES, **wrong)
    with pytest.raises(ConfigError, match="text"):
        kv.generate("x", **HIGH)


def test_models_of_both_frameworks(framework, model, size):
    plain, high = model(2), model(2, **HIGH)

    def tokens(llm, **more) -> int:
        framework.text(llm, ASKED, **more)
        return llm.last_report.tokens.prompt

    assert tokens(plain) == tokens(plain, chat_template_kwargs=None) == size()
    assert tokens(plain, **HIGH) == tokens(high) == size(**HIGH)
    assert tokens(high, **LOW) == size(**LOW)
    assert list(framework.pieces(high, ASKED))
    assert high.last_report.tokens.prompt == size(**HIGH)
    with pytest.raises(ConfigError, match="cannot have tools"):
        framework.text(plain, ASKED, **WRONG)
    with pytest.raises((ConfigError, ValidationError), match="cannot have tools"):
        model(2, **WRONG)


def test_what_the_frameworks_have_besides(kv, size):
    plain, high = ChatRagKV(kv=kv, max_tokens=2), ChatRagKV(kv=kv, max_tokens=2, **HIGH)
    for given, bound in ((HIGH, plain.bind(**HIGH)), (LOW, high.bind(extra_body=LOW))):
        assert bound.invoke(ASKED).usage_metadata["input_tokens"] == size(**given)
    assert high._identifying_params != plain._identifying_params  # LangChain's cache
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        plain.invoke(ASKED, chat_template_kwargs={5: 1})
    written = RagKVLLM(kv=kv, is_chat_model=True, **HIGH).to_dict()
    assert written["chat_template_kwargs"] == HIGH["chat_template_kwargs"]


def test_sinks_have_them(kv):
    """Chunks are exact right behind the head that the variables make."""
    template = ChatPromptTemplate.from_template("{context}\n\nWhy?")
    for given in ({}, {"sink_from": template}):
        llm = ChatRagKV(kv=kv, max_tokens=2, **HIGH, **given)
        llm.precompute(CHUNKS)
        answer = llm.invoke(template.format_messages(context="\n\n".join(CHUNKS)))
        report = answer.response_metadata["ragkv"]
        assert not report["warnings"]
        assert not report["misses"]
        assert llm.last_report.tokens.sink > 10
    qa = PromptTemplate("{context_str}\n\nWhy {query_str}?")
    index_llm = RagKVLLM(kv=kv, is_chat_model=True, max_new_tokens=2, sink_from=qa, **HIGH)
    index_llm.kv.precompute(CHUNKS, **index_llm.reuse_overrides)
    index_llm.predict(qa, context_str="\n\n".join(CHUNKS), query_str="so")
    report = index_llm.last_report
    assert not report.warnings
    assert "Effort: high" in index_llm.sink
    assert report.tokens.sink > 10


def test_a_sink_that_was_given_stays(make_engine):
    kv = make_engine(reuse=ReuseConfig(sink="My own sink.\n"))
    assert ChatRagKV(kv=kv, **HIGH)._overrides() == {}


def test_a_server_takes_json_alone(kv):
    with listening(kv) as url, RemoteRagKV(url) as remote:
        for value in ({1, 2}, object()):
            with pytest.raises(ConfigError, match="must be JSON"):
                remote.generate(MESSAGES, chat_template_kwargs={"effort": value})
        template = [{"role": "user", "content": "{context}"}]
        assert remote.sink_from(template, **HIGH) == kv.sink_from(template, **HIGH)
