"""ChatRagKV beyond langchain-tests: its settings, its account, its manners."""

import asyncio
from functools import cache

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import ConfigurableField
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from langchain_ragkv import ChatRagKV, RagKVLLM
from langchain_ragkv.prompts import convert_messages
from pydantic import ValidationError
from tiny import some_chunks, tiny_model, tiny_tokenizer
from transformers import pipeline

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.errors import ConfigError

PROMPT = ChatPromptTemplate.from_messages(
    [("system", 'Answer from the text, as {{"answer": ...}}.\n\n{context}'), ("human", "{input}")]
)
QUESTION = "What is a target list?"


@cache
def engine() -> RagKV:
    store = StoreConfig(":memory:", history_bytes=0)  # tests ask the same prompt
    kv = RagKV(tiny_model(), tiny_tokenizer(), store=store)
    kv.precompute(some_chunks())
    return kv


def chat(**fields):
    return ChatRagKV(kv=engine(), **{"max_tokens": 12, **fields})


def prompt():
    return "\n\n".join([*some_chunks(), QUESTION])


def report(message):
    return message.response_metadata["ragkv"]


def test_the_account_of_an_answer():
    answer = chat().invoke(prompt())
    account = report(answer)
    usage = answer.usage_metadata
    assert usage["input_tokens"] == account["tokens"]["prompt"]
    assert usage["output_tokens"] == account["decode"]["tokens"] == 12
    assert usage["total_tokens"] == usage["input_tokens"] + 12
    read = account["tokens"]["sink"] + account["tokens"]["reused"]
    assert usage["input_token_details"] == {"cache_read": read, "cache_creation": 0}
    assert read > 100
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == engine().info.name


def test_the_account_does_not_repeat_the_prompt():
    llm = chat()
    account = report(llm.invoke(prompt()))
    assert llm.last_report.ttft_s == account["ttft_s"]
    assert llm.last_report.trace is not None
    whole = engine().generate(prompt(), max_new_tokens=1).report.to_dict()
    assert set(account) == set(whole) - {"positions"}
    fields = {"start", "end", "reused", "recomputed", "source"}
    assert [set(use) for use in account["chunks"]] == [fields] * 3
    assert not any(text[:40] in str(account) for text in some_chunks())


def test_a_stream_gives_the_same_text_and_account():
    answer, chunks = chat().invoke(prompt()), list(chat().stream(prompt()))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert all(not chunk.usage_metadata and not chunk.response_metadata for chunk in chunks[:-1])
    assert all(chunk.content for chunk in chunks[:-1])
    assert chunks[-1].chunk_position == "last"
    assert chunks[-1].usage_metadata == answer.usage_metadata
    assert report(chunks[-1])["chunks"] == report(answer)["chunks"]
    assert chunks[-1].response_metadata["finish_reason"] == "length"


def test_settings_may_be_bound_and_configurable():
    bound = chat().bind(recompute_ratio=1).invoke(prompt())
    assert report(bound)["effective_ratio"] == 1
    configurable = chat().configurable_fields(recompute_ratio=ConfigurableField(id="ratio"))
    answer = configurable.with_config(configurable={"ratio": 0.75}).invoke(prompt())
    assert report(answer)["recompute_ratio"] == 0.75
    assert len(list(chat().stream(prompt(), max_tokens=1))) <= 2


@pytest.mark.parametrize("wrapper", [ChatRagKV, RagKVLLM])
def test_tokens_are_counted_with_the_models_tokenizer(wrapper):
    model = wrapper(kv=engine())
    ids = tiny_tokenizer()(QUESTION, add_special_tokens=False)["input_ids"]
    assert model.get_token_ids(QUESTION) == ids
    assert model.get_num_tokens(QUESTION) == len(ids)
    assert model.get_num_tokens_from_messages([HumanMessage(QUESTION)]) > len(ids)
    assert wrapper(kv=engine(), custom_get_token_ids=lambda _: [7]).get_token_ids(QUESTION) == [7]


def test_how_long_an_answer_may_be():
    def drawn(model, **call):
        return model.invoke(prompt(), **call).usage_metadata["output_tokens"]

    assert drawn(chat()) == drawn(chat(), max_tokens=None) == 12
    assert drawn(chat(max_tokens=None), max_tokens=None) == 256


@pytest.mark.parametrize(
    "wrong", [{"recompute_ratio": 2}, {"method": "nonesuch"}, {"recompute_ration": 0.1}]
)
def test_a_wrong_setting_is_refused_at_once(wrong):
    with pytest.raises(ValidationError):
        chat(**wrong)
    with pytest.raises(ConfigError):
        chat().invoke(prompt(), **wrong)


def test_an_answer_ends_before_a_stop_text():
    whole = chat().invoke(prompt()).content
    stop = whole[4:7]
    for answer in (
        chat().invoke(prompt(), stop=[stop]),
        chat(stop=stop).invoke(prompt()),
        chat(stop_sequences=[stop, "never"]).invoke(prompt()),
        chat().invoke(prompt(), stop_sequences=[stop]),
        chat(stop=["never"]).bind(stop_sequences=stop).invoke(prompt()),
    ):
        assert answer.content == whole[: whole.index(stop)]
        assert answer.response_metadata["finish_reason"] == "stop"
    assert chat(stop=stop).invoke(prompt(), stop=["never"]).content == whole
    assert chat().invoke(prompt(), stop=["never"], stop_sequences=[stop]).content == whole
    assert (
        "".join(c.content for c in chat(stop=stop).stream(prompt())) == whole[: whole.index(stop)]
    )


def test_batch_answers_each_prompt():
    prompts = [prompt(), "Hello", prompt() + "!"]
    expected = [chat().invoke(each).content for each in prompts]
    for answers in (chat().batch(prompts), asyncio.run(chat().abatch(prompts))):
        assert [answer.content for answer in answers] == expected


def test_streaming_tells_callbacks_every_piece():
    class Listener(BaseCallbackHandler):
        heard = ""

        def on_llm_new_token(self, token, **kwargs):
            self.heard += token

    inner, outer = Listener(), Listener()
    text = chat(streaming=True).invoke(prompt(), {"callbacks": [inner]}).content
    list(chat().stream(prompt(), {"callbacks": [outer]}))
    assert inner.heard == outer.heard == text == chat().invoke(prompt()).content


def test_a_cache_of_answers_knows_the_settings():
    cached = InMemoryCache()
    first = chat(cache=cached, method="reuse").invoke(prompt())
    again = chat(cache=cached, method="reuse").invoke(prompt())
    assert report(first)["ttft_s"] == report(again)["ttft_s"]
    assert report(chat(cache=cached, method="full").invoke(prompt()))["method"] == "full"


def test_a_cache_of_answers_knows_the_weights_and_the_engines_settings():
    """Models made in the process have one name; engines may differ by their settings alone."""
    engines = [
        engine(),
        RagKV(tiny_model(seed=1), tiny_tokenizer(), store=":memory:"),
        RagKV(engine().loaded, store=":memory:", reuse=ReuseConfig(method="full")),
    ]
    cached = InMemoryCache()
    first, other, full = (ChatRagKV(kv=kv, cache=cached, max_tokens=8) for kv in engines)
    assert first.invoke(prompt()).content != other.invoke(prompt()).content
    assert report(full.invoke(prompt()))["method"] == "full"
    pipelines = [RagKVLLM(kv=kv) for kv in (*engines, engine())]
    said = [str(pipe._identifying_params) for pipe in pipelines]
    assert len(set(said)) == 3
    assert said[0] == said[3]


def test_messages_become_roles_and_text():
    call = {"name": "add", "args": {"a": 1}, "id": "7"}
    assert convert_messages(
        [
            SystemMessage("Be brief."),
            HumanMessage([{"type": "text", "text": "How "}, "many?"], name="ann"),
            AIMessage(
                [{"type": "reasoning", "reasoning": "..."}, {"type": "text", "text": "One."}]
            ),
            AIMessage("", tool_calls=[call]),
            ToolMessage("2", tool_call_id="7", name="add"),
            ChatMessage("Go on.", role="critic"),
        ]
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "One."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "7", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "7", "name": "add"},
        {"role": "critic", "content": "Go on."},
    ]
    blocks = [SystemMessage([{"type": "text", "text": prompt()}])]
    assert chat().invoke(blocks).content == chat().invoke([SystemMessage(prompt())]).content


@pytest.mark.parametrize("kind", ["image", "image_url", "audio", "file"])
def test_what_is_not_text_is_refused(kind):
    with pytest.raises(ConfigError, match=f"content of type '{kind}' is not read"):
        chat().invoke([HumanMessage([{"type": kind, "url": "..."}])])


def test_messages_without_a_role_are_refused():
    with pytest.raises(ConfigError, match="no role"):
        convert_messages([FunctionMessage("2", name="add")])
    with pytest.raises(ConfigError, match="At least one"):
        convert_messages([])


HEAD = '<|bos|><|im_start|>system\nAnswer from the text, as {"answer": ...}.\n\n'


@pytest.mark.parametrize(
    ("template", "head"),
    [
        (PROMPT, HEAD),
        (PROMPT.partial(input="constant"), HEAD),
        (
            ChatPromptTemplate.from_messages([("system", "You are {name}. {context}")]).partial(
                name="Ann"
            ),
            "<|bos|><|im_start|>system\nYou are Ann. ",
        ),
        (
            ChatPromptTemplate.from_messages(
                [("system", "S"), MessagesPlaceholder("past"), ("human", "{context}")]
            ),
            "<|bos|><|im_start|>system\nS<|im_end|>\n<|im_start|>user\n",
        ),
        (
            PromptTemplate.from_template("Read:\n{context}\n{input}"),
            "<|bos|><|im_start|>user\nRead:\n",
        ),
        (
            PromptTemplate.from_template("Read:\n{{ context }}", template_format="jinja2"),
            "<|bos|><|im_start|>user\nRead:\n",
        ),
        ("Use this: {context}\n\n{question}", "<|bos|><|im_start|>user\nUse this: "),
    ],
)
def test_the_sink_is_the_prompt_templates_head(template, head):
    assert chat(sink_from=template)._overrides()["sink"] == head


def test_a_sink_from_the_template_covers_the_head_of_its_prompts(make_engine):
    kv = make_engine()
    model = ChatRagKV(kv=kv, sink_from=PROMPT, max_tokens=4)
    documents = [Document(text) for text in some_chunks()]
    assert model.precompute(documents).new == 3
    assert model.precompute(documents).existing == 3
    assert not kv.contains(documents[0].page_content)  # behind another sink
    messages = PROMPT.format_messages(context="\n\n".join(some_chunks()), input=QUESTION)
    account = report(model.invoke(messages))
    head = kv.tokenizer(HEAD, add_special_tokens=False)["input_ids"]
    assert account["tokens"]["sink"] >= len(head) - 1
    assert account["misses"] == ()


@pytest.mark.parametrize("template", ["no variable", 5, PromptTemplate.from_template("none")])
def test_a_sink_needs_a_template_with_a_variable(template):
    with pytest.raises(ValidationError, match="sink_from"):
        chat(sink_from=template)


def pipe(**settings):
    return pipeline(
        "text-generation",
        model=engine().loaded.model,
        tokenizer=engine().tokenizer,
        **{"max_new_tokens": 12, "do_sample": False, "return_full_text": False, **settings},
    )


def test_swapping_chat_hugging_face_changes_no_text():
    documents = [Document(text) for text in some_chunks()]
    ordinary = ChatHuggingFace(
        llm=HuggingFacePipeline(pipeline=pipe()), tokenizer=engine().tokenizer
    )
    swapped = chat(recompute_ratio=1)
    swapped.precompute(documents)
    answers = [
        create_stuff_documents_chain(model, PROMPT).invoke(
            {"context": documents, "input": QUESTION}
        )
        for model in (ordinary, swapped)
    ]
    assert answers[0] == answers[1]
    assert answers[0]


def test_top_k_is_sampled_among():
    greedy = chat().invoke(prompt()).content
    assert chat(temperature=5.0, top_k=1).invoke(prompt()).content == greedy
    assert chat(temperature=5.0).invoke(prompt(), top_k=1).content == greedy
    assert chat(temperature=5.0, top_k=0).invoke(prompt(), seed=1).content != greedy


def test_a_model_is_loaded_by_its_folder(folder):
    keywords = {
        "task": "text-generation",
        "pipeline_kwargs": {"max_new_tokens": 12, "do_sample": False},
    }
    answers = [
        ChatRagKV.from_model_id(folder, store=":memory:", method="full", **settings).invoke(
            prompt()
        )
        for settings in (
            {"max_tokens": 12},
            {**keywords, "device": -1, "batch_size": 4},
            {**keywords, "model_kwargs": {"attn_implementation": "eager"}},
        )
    ]
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].response_metadata["model_name"] == folder
    sampled = ChatRagKV.from_model_id(folder, store=":memory:", do_sample=True)
    assert sampled.temperature == 0.7


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": "summarization"},
        {"backend": "endpoint"},
        {"pipeline_kwargs": {"num_beams": 4}},
        {"device": 0, "device_map": "auto"},
    ],
)
def test_what_from_model_id_cannot_keep_is_refused(wrong):
    with pytest.raises(ConfigError):
        ChatRagKV.from_model_id("nowhere", **wrong)
