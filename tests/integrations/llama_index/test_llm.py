import inspect
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from llama_index.core.base.llms.types import (
    ChatMessage,
    CitableBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
)
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.prompts.default_prompts import DEFAULT_TEXT_QA_PROMPT_TMPL
from llama_index.llms.huggingface import HuggingFaceLLM
from llama_index.llms.ragkv import RagKVLLM
from llama_index.llms.ragkv.call import decode_arguments
from tiny import some_chunks, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from ragkv import RagKV, ReuseConfig
from ragkv.errors import ConfigError, ModelNotFoundError

SIZE = {"max_new_tokens": 12, "context_window": 2000}
GREEDY = {"generate_kwargs": {"do_sample": False}}
PROMPT = "Context:\n" + "\n\n".join(some_chunks()) + "\nWhat is a target?\nAnswer: "
CHAT = [
    ChatMessage(role=MessageRole.SYSTEM, content="Answer shortly."),
    ChatMessage(role=MessageRole.USER, content=PROMPT),
]


def with_bos():
    """Return a tokenizer that puts BOS before every text."""
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer


def make(kv, **kwargs):
    llm = RagKVLLM(kv=kv, **{**SIZE, **GREEDY, **kwargs})
    kv.precompute(some_chunks(), **{k: v for k, v in llm.reuse_overrides.items() if k == "sink"})
    return llm


def huggingface(kv, **kwargs):
    return HuggingFaceLLM(model=kv.loaded.model, tokenizer=kv.tokenizer, **SIZE, **GREEDY, **kwargs)


def test_it_takes_every_argument_of_huggingface_llm_in_the_same_order():
    theirs = list(inspect.signature(HuggingFaceLLM.__init__).parameters)
    assert list(inspect.signature(RagKVLLM.__init__).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"query_wrapper_prompt": "Q: {query_str}\nA:"},
        {
            "query_wrapper_prompt": PromptTemplate("<{query_str}>"),
            "completion_to_prompt": str.upper,
        },
    ],
)
def test_complete_at_ratio_1_gives_the_text_of_huggingface_llm(kv, settings):
    theirs = huggingface(kv, **settings).complete(PROMPT)
    ours = make(kv, recompute_ratio=1, **settings).complete(PROMPT)
    assert ours.text == theirs.text != ""
    if "completion_to_prompt" not in settings:  # upper case is no chunk's text
        assert ours.additional_kwargs["tokens"]["recomputed"] > 0


def test_formatted_prompts_are_taken_verbatim(kv):
    wrapped = {"query_wrapper_prompt": "Q: {query_str}\nA:"}
    theirs = huggingface(kv, **wrapped).complete(PROMPT, formatted=True)
    assert (
        make(kv, recompute_ratio=1, **wrapped).complete(PROMPT, formatted=True).text == theirs.text
    )
    assert make(kv, recompute_ratio=1).complete(PROMPT).text == theirs.text


def test_stopping_ids_end_the_answer_as_in_huggingface_llm(kv):
    ids = make(kv, recompute_ratio=1).complete(PROMPT).raw["token_ids"]
    stop = [next(token for token in ids[3:] if token not in ids[:3])]
    theirs = huggingface(kv, stopping_ids=stop).complete(PROMPT)
    before = kv.loaded.model.generation_config.eos_token_id
    ours = make(kv, recompute_ratio=1, stopping_ids=stop).complete(PROMPT)
    assert ours.raw["token_ids"] == ids[: ids.index(stop[0]) + 1]
    assert ours.text == theirs.text
    assert kv.loaded.model.generation_config.eos_token_id == before, "the model is left as it was"


def test_chat_at_ratio_1_gives_the_text_of_huggingface_llm(kv):
    theirs = huggingface(kv, is_chat_model=True).chat(CHAT)
    ours = make(kv, recompute_ratio=1, is_chat_model=True).chat(CHAT)
    assert ours.message.content == theirs.message.content != ""


def test_the_system_prompt_reaches_complete_and_stream(kv):
    expected = make(kv, recompute_ratio=1).complete("Be short. " + PROMPT).text
    llm = make(kv, recompute_ratio=1, system_prompt="Be short.")
    assert llm.complete(PROMPT).text == expected
    assert list(llm.stream_complete(PROMPT))[-1].text == expected


def test_streaming_gives_complete_s_text_and_heeds_completion_to_prompt(kv):
    llm = make(kv, completion_to_prompt=lambda text: f"Read this. {text}")
    whole = llm.complete(PROMPT)
    responses = list(llm.stream_complete(PROMPT))
    assert "".join(response.delta for response in responses) == whole.text
    assert [r.text for r in responses] == sorted((r.text for r in responses), key=len)
    assert responses[-1].text == whole.text != make(kv).complete(PROMPT).text
    assert responses[-1].raw["token_ids"] == whole.raw["token_ids"]
    chat = list(make(kv).stream_chat(CHAT))
    assert chat[-1].message.content == make(kv).chat(CHAT).message.content
    assert chat[-1].raw["report"]["tokens"]["reused"] > 0


def test_no_second_bos(make_engine):
    tokenizer = with_bos()
    kv = make_engine()
    plain = len(tokenizer(PROMPT)["input_ids"])
    with RagKV(kv.loaded.model, tokenizer, store=":memory:") as engine:
        llm = RagKVLLM(kv=engine, **SIZE)
        assert llm.complete(PROMPT).additional_kwargs["tokens"]["prompt"] == plain
        assert llm.complete("<|bos|>" + PROMPT).additional_kwargs["tokens"]["prompt"] == plain
        text = llm.messages_to_prompt(CHAT)
        once = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert llm.chat(CHAT).additional_kwargs["tokens"]["prompt"] == once
        tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")
        assert llm.chat(CHAT).additional_kwargs["tokens"]["prompt"] == once - 1
        tokenizer.chat_template = None
        assert llm.messages_to_prompt(CHAT).startswith("system: Answer shortly.\nuser: ")
        assert llm.chat(CHAT).message.content


@pytest.mark.parametrize(
    "block",
    [
        ImageBlock(url="https://example.org/picture.png"),
        DocumentBlock(data=b"text"),
        CitableBlock(title="a", source="b", content=[TextBlock(text="text")]),
    ],
)
def test_what_is_not_text_is_refused(kv, block):
    blocks = [TextBlock(text="What is this?"), block]
    with pytest.raises(ConfigError, match=f"'{block.block_type}'"):
        make(kv).chat([ChatMessage(role="user", blocks=blocks)])


def test_own_chat_rendering(kv):
    own = {"recompute_ratio": 1, "is_chat_model": True}
    llm = make(kv, messages_to_prompt=lambda messages: messages[-1].content, **own)
    expected = make(kv, recompute_ratio=1).complete(PROMPT).text
    assert llm.chat(CHAT).message.content == expected

    def plainly(messages):
        return "\n".join(message.content for message in messages)

    llm = RagKVLLM(kv=kv, is_chat_model=True, sink_from="default", messages_to_prompt=plainly)
    assert llm.sink.startswith("You are an expert Q&A system")
    assert llm.sink.endswith("---------------------\n")


def test_a_copy_shares_the_engine(kv):
    llm = make(kv)
    assert deepcopy(llm).kv is kv


def test_the_report_is_with_the_answer_and_not_in_the_chat_message(kv):
    llm = make(kv)
    answer = llm.complete(PROMPT)
    assert answer.additional_kwargs["tokens"]["reused"] > 0
    report = llm.last_report.to_dict()
    assert answer.raw["report"] == report
    assert answer.additional_kwargs == {**report, "finish_reason": answer.raw["finish_reason"]}
    assert answer.raw["usage"]["completion_tokens"] == len(answer.raw["token_ids"]) > 0
    reply = llm.chat(CHAT)
    assert reply.additional_kwargs["tokens"]["reused"] > 0
    assert reply.message.additional_kwargs == {}


def test_settings_of_one_call(kv):
    llm = make(kv, recompute_ratio=0.5, method="epic")
    assert llm.complete(PROMPT).additional_kwargs["recompute_ratio"] == 0.5
    assert len(llm.complete(PROMPT, max_new_tokens=3).raw["token_ids"]) <= 3
    with pytest.raises(ConfigError, match="no_such"):
        llm.complete(PROMPT, no_such=1)
    llm.recompute_ratio = 0.0
    assert llm.complete(PROMPT).additional_kwargs["recompute_ratio"] == 0.0


def test_a_window_beyond_the_model_s_is_clipped(kv, caplog):
    assert RagKVLLM(kv=kv, context_window=100_000).metadata.context_window == 4096
    assert "4096" in caplog.text


def test_the_sink_is_taken_from_the_template(kv):
    head = DEFAULT_TEXT_QA_PROMPT_TMPL.partition("{context_str}")[0]
    assert RagKVLLM(kv=kv, sink_from="default").sink == head
    template = PromptTemplate(
        "Read.\n{my_context}\n{query_str}", template_var_mappings={"context_str": "my_context"}
    )
    assert RagKVLLM(kv=kv, sink_from=template).sink == "Read.\n"
    llm = RagKVLLM(kv=kv, sink_from="As {json}: {context_str}", system_prompt='Say {"a": 1}.')
    assert llm.sink == 'Say {"a": 1}.\n\nAs {json}: '
    chat = ChatPromptTemplate(
        [
            ChatMessage(role="system", content="S"),
            ChatMessage(role="user", content="C: {context_str}"),
        ]
    )
    llm = RagKVLLM(kv=kv, sink_from=chat, is_chat_model=True)
    assert llm.sink == "<|bos|><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nC: "
    for wrong in ("no field", "{query_str}"):
        with pytest.raises(ConfigError, match="context_str"):
            RagKVLLM(kv=kv, sink_from=wrong)
    assert RagKVLLM(kv=kv).sink is None, "an engine's own setting stands"
    assert RagKVLLM(kv=kv, sink="x", sink_from="default").sink == "x"


@pytest.mark.parametrize(
    ("template", "head"),
    [
        (PromptTemplate("As a {tone}:\n{context_str}\n{query_str}"), "As a pirate:\n"),
        (RichPromptTemplate("As a {{ tone }}:\n{{ context_str }}"), "As a pirate:\n"),
        (PromptTemplate("Question: {query_str}\nText: {context_str}"), "Question: "),
        (PromptTemplate("{query_str}\n{context_str}"), ""),
        (PromptTemplate("As {{json}}, {json}, {}: {context_str}"), "As {{json}}, {json}, {}: "),
        (
            PromptTemplate("Q: {q} {context_str}", template_var_mappings={"query_str": "q"}),
            "Q: ",
        ),
        (
            ChatPromptTemplate(
                [ChatMessage(role="user", content="As a {tone}: {context_str} {query_str}")]
            ),
            "<|bos|><|im_start|>user\nAs a pirate: ",
        ),
    ],
)
def test_the_sink_is_what_a_query_engine_s_prompts_begin_with(kv, template, head):
    template = template.partial_format(tone="pirate")
    llm = RagKVLLM(kv=kv, sink_from=template)
    assert llm.sink == head
    for question in ("What?", "Why?"):  # as a response synthesizer renders it
        filled = template.partial_format(query_str=question)
        assert llm.render_template(filled, context_str="Text").startswith(head)


@pytest.mark.parametrize("is_chat_model", [False, True])
def test_a_prompt_begins_with_the_sink(kv, is_chat_model):
    """Chunks behind the derived sink stand right behind it in the prompt: reuse is exact."""
    from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

    llm = make(kv, sink_from="default", is_chat_model=is_chat_model, recompute_ratio=0.0)
    (chunk,) = some_chunks(1)
    answer = llm.predict(DEFAULT_TEXT_QA_PROMPT_SEL, context_str=chunk, query_str="What?")
    report = llm.last_report
    assert report.tokens.sink > 20
    assert report.tokens.reused > 20
    full = make(kv, sink_from="default", is_chat_model=is_chat_model, method="full")
    assert answer == full.predict(DEFAULT_TEXT_QA_PROMPT_SEL, context_str=chunk, query_str="What?")


def test_an_llm_makes_its_own_engine(make_engine, folder):
    llm = RagKVLLM(
        model_name=folder,
        store=":memory:",
        reuse=ReuseConfig(method="epic"),
        **SIZE,
        **GREEDY,
    )
    assert (
        llm.complete(PROMPT).text
        == make(make_engine(layers=None), method="full").complete(PROMPT).text
    )
    assert llm.metadata.model_name == folder
    assert llm.last_report.method == "epic"
    assert llm.sink.startswith("Context information is below."), "a reuse without a sink"
    by_kwargs = RagKVLLM(
        model_name=folder,
        store=":memory:",
        model_kwargs={"attn_implementation": "eager"},
        device_map="cpu",
    )
    assert by_kwargs.kv.loaded.model.config._attn_implementation == "eager"
    assert by_kwargs.sink.startswith("Context information is below.")


MODEL_S_OWN = SimpleNamespace(do_sample=True, temperature=0.7, top_p=None)


@pytest.mark.parametrize(
    ("generate_kwargs", "call", "config", "temperature", "top_p"),
    [
        ({}, {}, None, 0.0, None),
        ({}, {}, MODEL_S_OWN, 0.7, 1.0),
        ({"do_sample": False, "temperature": 0.7, "top_k": 50}, {}, MODEL_S_OWN, 0.0, None),
        ({"do_sample": True, "temperature": 0.3, "top_p": 0.9}, {}, None, 0.3, 0.9),
        ({"temperature": 0.7, "top_k": 50, "top_p": 0.95}, {}, None, 0.0, None),
        ({"do_sample": True}, {"temperature": 0}, None, 0.0, None),
        ({}, {"temperature": 0.5}, None, 0.5, 1.0),
    ],
)
def test_sampling_settings(generate_kwargs, call, config, temperature, top_p):
    got = decode_arguments(generate_kwargs, call, max_new_tokens=5, generation_config=config)
    assert got["temperature"] == temperature
    assert got.get("top_p") == top_p
    assert got["max_new_tokens"] == 5


def test_lengths_and_reuse_settings():
    got = decode_arguments(
        {"max_new_tokens": 7, "pad_token_id": 0, "use_cache": True},
        {"max_tokens": 9, "recompute_ratio": 0.5},
        max_new_tokens=5,
        generation_config=None,
    )
    assert got == {"max_new_tokens": 9, "recompute_ratio": 0.5, "temperature": 0.0, "stop": ()}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"max_tokens": None}, 7),
        ({"max_new_tokens": None}, 7),
        ({"max_new_tokens": 9, "max_tokens": None}, 9),
        ({"max_new_tokens": 0}, 0),
        ({"max_tokens": 0}, 0),
    ],
)
def test_none_is_no_length_and_zero_is_one(call, expected):
    got = decode_arguments({"max_new_tokens": 7}, call, max_new_tokens=5, generation_config=None)
    assert got["max_new_tokens"] == expected
    own = decode_arguments({}, {"max_tokens": None}, max_new_tokens=5, generation_config=None)
    assert own["max_new_tokens"] == 5


@pytest.mark.parametrize(
    "given",
    [
        {"reuse": ReuseConfig(recompute_ratio=1.0)},
        {"store": ":memory:"},
        {"namespace": "tenant"},
        {"method": "epic", "recompute_ratio": "auto"},
    ],
)
def test_what_an_engine_cannot_do_is_refused_at_once(kv, given):
    with pytest.raises(ConfigError):
        RagKVLLM(kv=kv, **given)


def test_what_it_writes_it_loads_again():
    llm = RagKVLLM(store=":memory:", model_kwargs={"dtype": torch.bfloat16}, **SIZE)
    assert llm.kv.loaded.model.dtype == torch.bfloat16
    plain = RagKVLLM(store=":memory:", tokenizer_kwargs={"padding_side": "left"}, **SIZE)
    assert plain.kv.tokenizer.padding_side == "left"
    left_out = {"store": ":memory:", "tokenizer_kwargs": {"padding_side": "left"}}
    again = RagKVLLM.from_dict(plain.to_dict(), **left_out)
    assert again.model_name == again.kv.info.name == plain.model_name
    with pytest.raises(ModelNotFoundError):
        RagKVLLM(model_name="no/such-model", model_kwargs={"dtype": torch.bfloat16})


def test_prompt_lookup_is_one_of_the_generate_kwargs(kv):
    for count in (0, 5, None):
        llm = make(kv, generate_kwargs={"prompt_lookup_num_tokens": count, "max_new_tokens": 60})
        assert llm.complete(PROMPT).text
        assert (llm.last_report.decode.drafted == 0) == (count == 0)
    with pytest.raises(ConfigError, match="prompt_lookup_num_tokens"):
        make(kv, generate_kwargs={"prompt_lookup_num_tokens": -1}).complete(PROMPT)
