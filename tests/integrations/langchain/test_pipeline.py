"""RagKVPipeline in the place of HuggingFacePipeline."""

from __future__ import annotations

import asyncio
import copy
import logging
from functools import cache

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_huggingface import HuggingFacePipeline
from langchain_ragkv import ChatRagKV, RagKVPipeline, generation
from pydantic import ValidationError
from tiny import some_chunks, tiny_model, tiny_tokenizer
from transformers import pipeline
from transformers.cache_utils import StaticCache

from ragkv import RagKV
from ragkv.errors import ConfigError
from ragkv.model.calls import cache_in

PROMPT = PromptTemplate.from_template("Read:\n\n{context}\n\nQuestion: {input}\nAnswer:")
QUESTION = "What is a target list?"
DOCUMENTS = [Document(text) for text in some_chunks()]


@cache
def model(family):
    return tiny_model(family)


def pipe(family="llama", **settings):
    return pipeline(
        "text-generation",
        model=model(family),
        tokenizer=tiny_tokenizer(),
        **{"max_new_tokens": 12, "do_sample": False, **settings},
    )


@cache
def engine():
    kv = RagKV(model("llama"), tiny_tokenizer(), store=":memory:")
    kv.precompute(some_chunks())
    return kv


def swapped(made=None, **fields):
    return RagKVPipeline(
        pipeline=made or pipe(), **{"kv": engine(), "recompute_ratio": 1, **fields}
    )


def prompt():
    return PROMPT.format(context="\n\n".join(some_chunks()), input=QUESTION)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("chat", [True, False])
def test_one_line_swapped_the_answers_are_the_same(family, chat):
    template = PROMPT
    if chat:
        template = ChatPromptTemplate.from_messages([("system", "{context}"), ("human", "{input}")])
    made = pipe(family, return_full_text=False)
    ordinary = HuggingFacePipeline(pipeline=made)
    ours = RagKVPipeline(pipeline=made, store=":memory:", recompute_ratio=1, sink_from=template)
    ours.precompute(DOCUMENTS)
    answers = []
    for llm in (ordinary, ours):
        chain = create_stuff_documents_chain(llm, template)
        answers.append(chain.invoke({"context": DOCUMENTS, "input": QUESTION}))
    assert answers[0] == answers[1]
    assert answers[0]


def test_the_sink_is_the_head_of_the_string_that_the_model_reads():
    chat = ChatPromptTemplate.from_messages([("system", "Read {context}"), ("human", "{input}")])
    assert swapped(sink_from=PROMPT)._overrides()["sink"] == "Read:\n\n"
    assert swapped(sink_from=chat)._overrides()["sink"] == "System: Read "


def test_an_lcel_chain_swapped_reuses_chunks():
    llm = swapped(recompute_ratio=0.2, sink_from=PROMPT)
    llm.precompute(DOCUMENTS)
    chain = PROMPT | llm.bind(skip_prompt=True) | StrOutputParser()
    assert chain.invoke({"context": "\n\n".join(some_chunks()), "input": QUESTION})
    info = llm.generate([prompt()]).generations[0][0].generation_info
    assert info["ragkv"]["conversation_tokens"] > 100  # the same prompt again
    assert info["usage_metadata"]["input_token_details"]["cache_read"] > 100
    assert info["finish_reason"] == "length"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"return_full_text": False},
        {"skip_special_tokens": False},
        {"max_new_tokens": 3},
        {"max_new_tokens": None, "max_length": 420},
        {"stop_sequence": "e"},
        {"pad_token_id": 0, "num_beams": 1, "use_cache": True},
        {"repetition_penalty": 1.3, "length_penalty": 1.0},
        {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 0},
        {"suppress_tokens": list(range(100, 400)), "early_stopping": False},
        {"eos_token_id": list(range(200, 500))},
    ],
)
def test_pipeline_settings_mean_what_they_mean(settings):
    """At construction of the pipeline and for one call alike."""
    settings = {name: value for name, value in settings.items() if value is not None}
    bare = {} if "max_length" in settings else {"max_new_tokens": 12}
    made = pipeline(
        "text-generation",
        model=model("llama"),
        tokenizer=tiny_tokenizer(),
        do_sample=False,
        **bare | settings,
    )
    text = HuggingFacePipeline(pipeline=made).invoke(prompt())
    assert swapped(made).invoke(prompt()) == text
    if "max_length" not in settings:
        assert swapped().invoke(prompt(), pipeline_kwargs=settings) == text
        assert swapped().bind(pipeline_kwargs=settings).invoke(prompt()) == text


def test_the_models_own_generation_config_is_kept():
    own = copy.deepcopy(model("llama"))
    own.generation_config.repetition_penalty = 1.5
    made = pipeline(
        "text-generation", model=own, tokenizer=tiny_tokenizer(), max_new_tokens=24, do_sample=False
    )
    text = HuggingFacePipeline(pipeline=made).invoke(prompt())
    ours = RagKVPipeline(pipeline=made, store=":memory:", recompute_ratio=1)
    ours.precompute(DOCUMENTS)
    assert ours.invoke(prompt()) == text
    assert text != swapped(pipe(max_new_tokens=24)).invoke(prompt())


@pytest.mark.parametrize("made", [swapped, lambda: ChatRagKV(llm=swapped())])
def test_a_deep_copy_shares_the_engine(made):
    ours = made()
    theirs = copy.deepcopy(ours)
    assert theirs.kv is ours.kv
    assert theirs == ours
    assert theirs.invoke(prompt()) is not None
    theirs.recompute_ratio = 0.5
    assert ours.recompute_ratio != 0.5


def test_skip_prompt_and_batches():
    prompts = [prompt(), "Hello", "Something else"]
    ordinary, ours = HuggingFacePipeline(pipeline=pipe(), batch_size=1), swapped()
    assert ours.batch(prompts) == ordinary.batch(prompts)
    assert ours.invoke(prompt(), skip_prompt=True) == ordinary.invoke(prompt(), skip_prompt=True)
    assert asyncio.run(ours.ainvoke(prompt())) == ordinary.invoke(prompt())


@pytest.mark.parametrize("call", [{}, {"skip_prompt": False}])
def test_streams_give_the_same_text(call):
    text = "".join(HuggingFacePipeline(pipeline=pipe()).stream(prompt(), **call))
    pieces = list(swapped().stream(prompt(), **call))
    assert "".join(pieces) == text
    assert len(pieces) > 5

    async def streamed() -> str:
        return "".join([piece async for piece in swapped().astream(prompt(), **call)])

    assert asyncio.run(streamed()) == text


def test_a_stream_ends_with_the_stop_sequence_as_transformers_does():
    made = pipe(stop_sequence="e")
    answer = swapped(made).invoke(prompt(), skip_prompt=True)
    assert "e" in answer
    assert "".join(swapped(made).stream(prompt())) == answer


def test_langchains_stop_is_kept():
    whole = swapped().invoke(prompt(), skip_prompt=True)
    stop = whole[3:5]
    cut = whole[: whole.index(stop)]
    assert swapped().invoke(prompt(), stop=[stop], skip_prompt=True) == cut
    assert "".join(swapped().stream(prompt(), stop=[stop])) == cut


def test_sampling_follows_the_pipeline_and_the_seed():
    llm = swapped(pipe(do_sample=True, temperature=2.0, top_p=0.9))
    assert llm.invoke(prompt(), seed=1) == llm.invoke(prompt(), seed=1)
    assert llm.invoke(prompt(), seed=1) != llm.invoke(prompt(), seed=2)


def test_settings_hold_per_call():
    def report(**call):
        made = swapped(recompute_ratio=0.5).generate([prompt()], **call)
        return made.generations[0][0].generation_info["ragkv"]

    assert report()["recompute_ratio"] == 0.5
    assert report(recompute_ratio=0, method="reuse")["recomputed_tokens"] == 0
    assert report(max_new_tokens=3)["completion_tokens"] == 3
    with pytest.raises(ConfigError, match="unknown reuse setting typical"):
        swapped().invoke(prompt(), typical=3)


def test_from_model_id(tmp_path):
    model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    keywords = {
        "task": "text-generation",
        "device": -1,
        "pipeline_kwargs": {"max_new_tokens": 12, "do_sample": False},
    }
    ordinary = HuggingFacePipeline.from_model_id(str(tmp_path), **keywords)
    ours = RagKVPipeline.from_model_id(
        str(tmp_path), **keywords, store=":memory:", recompute_ratio=1, namespace="mine"
    )
    ours.precompute(some_chunks())
    assert ours.invoke(prompt()) == ordinary.invoke(prompt())
    assert ours.kv.namespace == "mine"
    assert ours.model_id == str(tmp_path)


def test_an_engine_stands_for_a_pipeline():
    ours = RagKVPipeline(kv=engine(), pipeline_kwargs={"max_new_tokens": 12, "do_sample": False})
    ordinary = HuggingFacePipeline(pipeline=pipe())
    assert ours.invoke(prompt(), recompute_ratio=1) == ordinary.invoke(prompt())
    with pytest.raises(ValidationError, match="needs pipeline="):
        RagKVPipeline()


UNKNOWN = [
    {"num_beams": 2},
    {"guidance_scale": 1.3},
    {"do_sample": True, "encoder_no_repeat_ngram_size": 3},
    {"prefix": "Once "},
    {"return_tensors": True},
]


@pytest.mark.parametrize("settings", UNKNOWN)
def test_what_the_engine_cannot_keep_is_refused(settings):
    name = next(name for name in reversed(settings))
    with pytest.raises(ValidationError, match=f"does not support these settings.*{name}"):
        swapped(pipe(**settings))
    with pytest.raises(ConfigError, match=f"does not support these settings.*{name}"):
        swapped().invoke(prompt(), pipeline_kwargs=settings)


def test_or_answered_by_the_ordinary_pipeline(caplog):
    made = pipe(num_beams=2)
    text = HuggingFacePipeline(pipeline=made).invoke(prompt())
    with caplog.at_level(logging.WARNING):
        assert swapped(made, on_unsupported="full").invoke(prompt()) == text
    assert "num_beams" in caplog.text


def test_an_engine_over_another_model_is_refused():
    with pytest.raises(ValidationError, match="another model"):
        swapped(pipe("qwen3"))


def test_other_tasks_are_refused():
    made = pipe()
    made.task = "summarization"
    with pytest.raises(ValidationError, match="serves text-generation"):
        swapped(made)


def test_in_the_place_of_a_pipelines_static_cache_is_ragkvs(caplog):
    generation._say_own_cache.cache_clear()
    made, used = pipe(cache_implementation="static"), []
    hook = made.model.register_forward_hook(lambda _, __, out: used.append(cache_in(out)))
    llm = swapped(made)
    assert llm.invoke(prompt()) == swapped().invoke(prompt())
    ChatRagKV(llm=HuggingFacePipeline(pipeline=made), kv=engine()).invoke([("human", prompt())])
    hook.remove()
    assert used
    assert not any(isinstance(cache, StaticCache) for cache in used)
    assert [log.getMessage() for log in caplog.records if "static" in log.getMessage()] == [
        "the pipeline's cache_implementation='static': ragkv decodes over its own cache"
    ]
    with pytest.raises(ConfigError, match="cache_implementation is no setting"):
        swapped().invoke(prompt(), cache_implementation="static")
    with pytest.raises(ValidationError, match="cache_implementation is no setting"):
        ChatRagKV(kv=engine(), cache_implementation="static")
    with pytest.raises(ConfigError, match="cache_implementation is no setting"):
        ChatRagKV(kv=engine()).invoke("Hi", cache_implementation=None)
    with pytest.raises(ValidationError, match="cache_implementation"):
        swapped(pipe(cache_implementation="quantized"))


def test_a_pipelines_prompt_lookup_is_kept():
    chat = ChatRagKV(
        llm=HuggingFacePipeline(pipeline=pipe(prompt_lookup_num_tokens=3)), kv=engine()
    )
    assert chat.prompt_lookup_num_tokens == 3
    drafted = {}
    for count in (0, 3):
        message = chat.invoke([("human", prompt())], prompt_lookup_num_tokens=count, max_tokens=60)
        drafted[count] = message.response_metadata["ragkv"]["drafted_tokens"]
    assert drafted[0] == 0 < drafted[3]
