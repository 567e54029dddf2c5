"""RagKVLLM in the place of HuggingFacePipeline."""

import asyncio
import copy
from functools import cache

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_huggingface import HuggingFacePipeline
from langchain_ragkv import ChatRagKV, RagKVLLM
from pydantic import ValidationError
from tiny import some_chunks, tiny_model, tiny_tokenizer
from transformers import pipeline

from ragkv import RagKV
from ragkv.errors import ConfigError

PROMPT = PromptTemplate.from_template("Read:\n\n{context}\n\nQuestion: {input}\nAnswer:")
QUESTION = "What is a target list?"
DOCUMENTS = [Document(text) for text in some_chunks()]


@cache
def engine(family="llama"):
    kv = RagKV(tiny_model(family), tiny_tokenizer(), store=":memory:")
    kv.precompute(some_chunks())
    return kv


def ordinary(family="llama", **settings):
    given = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False, **settings}
    kv = engine(family)
    made = pipeline("text-generation", model=kv.loaded.model, tokenizer=kv.tokenizer, **given)
    return HuggingFacePipeline(pipeline=made, batch_size=1)


def swapped(family="llama", **fields):
    return RagKVLLM(kv=engine(family), **{"max_tokens": 12, "recompute_ratio": 1, **fields})


def prompt():
    return PROMPT.format(context="\n\n".join(some_chunks()), input=QUESTION)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("chat", [True, False])
def test_the_class_swapped_the_answers_are_the_same(family, chat):
    template = PROMPT
    if chat:
        template = ChatPromptTemplate.from_messages([("system", "{context}"), ("human", "{input}")])
    ours = swapped(family, sink_from=template)
    ours.precompute(DOCUMENTS)
    answers = []
    for llm in (ordinary(family), ours):
        chain = create_stuff_documents_chain(llm, template)
        answers.append(chain.invoke({"context": DOCUMENTS, "input": QUESTION}))
    assert answers[0] == answers[1]
    assert answers[0]


def test_the_sink_is_the_head_of_the_string_that_the_model_reads():
    chat = ChatPromptTemplate.from_messages([("system", "Read {context}"), ("human", "{input}")])
    assert swapped(sink_from=PROMPT)._overrides()["sink"] == "Read:\n\n"
    assert swapped(sink_from=chat)._overrides()["sink"] == "System: Read "


def test_an_lcel_chain_reuses_chunks():
    llm = swapped(recompute_ratio=0.2, sink_from=PROMPT)
    llm.precompute(DOCUMENTS)
    chain = PROMPT | llm.bind(skip_prompt=True) | StrOutputParser()
    assert chain.invoke({"context": "\n\n".join(some_chunks()), "input": QUESTION})
    info = llm.generate([prompt()]).generations[0][0].generation_info
    assert info["ragkv"]["tokens"]["history_exact"] > 100  # the same prompt again
    assert info["usage_metadata"]["input_token_details"]["cache_read"] > 100
    assert (info["finish_reason"], info["model_name"]) == ("length", llm.model_name)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 3},
        {"return_full_text": False},
        {"num_beams": 1, "use_cache": True},
        {"repetition_penalty": 1.3, "length_penalty": 1.0},
        {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 0},
        {"suppress_tokens": list(range(100, 400)), "early_stopping": False},
    ],
)
def test_pipeline_kwargs_mean_what_they_mean(settings, folder):
    """When a model is loaded and for one call alike."""
    text = ordinary(**settings).invoke(prompt())
    assert swapped().invoke(prompt(), pipeline_kwargs=settings) == text
    assert swapped().bind(pipeline_kwargs=settings).invoke(prompt()) == text
    loaded = RagKVLLM.from_model_id(
        folder,
        task="text-generation",
        device=-1,
        pipeline_kwargs={"max_new_tokens": 12, "do_sample": False, **settings},
        store=":memory:",
        namespace="mine",
    )
    assert loaded.invoke(prompt()) == text
    assert (loaded.kv.namespace, loaded.model_id) == ("mine", folder)
    loaded.kv.close()


def test_streams_batches_and_tasks_give_the_same_text():
    prompts = [prompt(), "Hello", "Something else"]
    llm, texts = swapped(), ordinary().batch(prompts)
    assert llm.batch(prompts) == texts
    assert asyncio.run(llm.ainvoke(prompt())) == texts[0]
    pieces = list(llm.stream(prompt()))
    assert "".join(pieces) == texts[0]
    assert len(pieces) > 5

    async def streamed():
        return "".join([piece async for piece in llm.astream(prompt())])

    assert asyncio.run(streamed()) == texts[0]


def test_stop_texts_end_the_answer():
    whole = swapped().invoke(prompt())
    stop = whole[3:5]
    cut = whole[: whole.index(stop)]
    assert swapped().invoke(prompt(), stop=[stop]) == cut
    assert "".join(swapped().stream(prompt(), stop=[stop])) == cut
    assert swapped().invoke(prompt(), pipeline_kwargs={"stop_strings": [stop]}) == cut


def test_settings_hold_per_call():
    def report(**call):
        made = swapped(recompute_ratio=0.5).generate([prompt()], **call)
        return made.generations[0][0].generation_info["ragkv"]

    assert report()["recompute_ratio"] == 0.5
    assert report(recompute_ratio=0, method="epic")["tokens"]["recomputed"] == 0
    assert report(max_new_tokens=3)["decode"]["tokens"] == 3
    sampled = {"pipeline_kwargs": {"do_sample": True, "temperature": 2.0}}
    first, again, other = (swapped().invoke(prompt(), seed=at, **sampled) for at in (1, 1, 2))
    assert first == again != other


def test_a_deep_copy_shares_the_engine():
    ours = swapped()
    theirs = copy.deepcopy(ours)
    assert theirs.kv is ours.kv
    assert theirs == ours
    theirs.recompute_ratio = 0.5
    assert ours.recompute_ratio == 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"pipeline_kwargs": {"num_beams": 2}}, "num_beams"),
        ({"pipeline_kwargs": {"guidance_scale": 1.3}}, "guidance_scale"),
        ({"skip_prompt": False}, "skip_prompt"),
        ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "ChatRagKV"),
        ({"typical": 3}, "typical"),
        ({"cache_implementation": "static"}, "cache_implementation"),
    ],
)
def test_what_cannot_be_kept_is_refused(call, says):
    with pytest.raises(ConfigError, match=says):
        swapped().invoke(prompt(), **call)


def test_wrong_engines_name_what_to_do():
    for wrapper in (ChatRagKV, RagKVLLM):
        with pytest.raises(ValidationError, match="from_model_id"):
            wrapper(llm=ordinary())
    with pytest.raises(ValidationError, match="kv must be a RagKV"):
        RagKVLLM(kv="a model")


def test_the_whole_report_is_at_hand():
    llm = swapped(max_tokens=4)
    for answer in (llm.invoke, lambda text: "".join(llm.stream(text))):
        llm._last_report = None
        assert answer(prompt())
        assert [use.text for use in llm.last_report.chunks] == some_chunks()


class Listener(BaseCallbackHandler):
    def __init__(self):
        self.heard = ""

    def on_llm_new_token(self, token, **kwargs):
        self.heard += token


def test_streaming_tells_callbacks_every_piece():
    one, two = Listener(), Listener()
    text = swapped(streaming=True).invoke("x", {"callbacks": [one]})
    assert asyncio.run(swapped(streaming=True).ainvoke("x", {"callbacks": [two]})) == text
    assert one.heard == two.heard == text == swapped().invoke("x")


def test_no_tokens_are_refused_by_either_name():
    for name in ("max_tokens", "max_new_tokens"):
        with pytest.raises(ConfigError, match="max_new_tokens"):
            swapped().invoke("x", **{name: 0})
