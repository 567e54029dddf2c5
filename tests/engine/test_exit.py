"""A script ends although there is much to heal: within a layer, as it gives way to a request."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fresh import output_of
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_ragkv import ChatRagKV
from langchain_ragkv import RagKVRetriever as LangChainRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.llms.ragkv import RagKVLLM
from llama_index.llms.ragkv import RagKVRetriever as LlamaIndexRetriever
from pausing import Pause
from tiny import some_chunks

from ragkv import RagKV, ReuseConfig
from ragkv.errors import ClosedError

PROGRAM = """
import atexit, json, sys, threading

seen = []
atexit.register(lambda: print(json.dumps([seen, stops.is_set()])))  # the last to run

from tiny import some_chunks, tiny_model, tiny_tokenizer
from ragkv import RagKV
from ragkv.model.architecture import backbone_of

begun = threading.Event()
kv = RagKV(tiny_model(), tiny_tokenizer(), store=":memory:")
stops = kv._reuse.healing._idle._closed

def before(layer, *_):
    if threading.current_thread().name.startswith("ragkv-idle"):
        seen.append(stops.is_set())
        begun.set()
        stops.wait(60)  # a layer that takes longer than the program

for layer in backbone_of(kv.loaded.model).layers:
    layer.register_forward_pre_hook(before)

chunks = some_chunks(12)
kv.precompute(chunks)

def ask():
    kv.generate("\\n\\n".join(chunks) + "\\n\\nWhat?", max_new_tokens=2)
    kv.prefetch(chunks)  # an answer would wait for the layer
    begun.wait(60)
"""
ENDS = {"at exit": "ask()", "after another thread": "threading.Thread(target=ask).start()"}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_within_a_layer(end):
    seen, stops = json.loads(output_of(PROGRAM + ENDS[end]))
    assert stops
    assert seen == [False]


def retriever(kv: RagKV) -> LangChainRetriever:
    nothing = RunnableLambda(lambda _: list[Document]())
    return LangChainRetriever(retriever=nothing, llm=ChatRagKV(kv=kv))


OVER: dict[str, Callable[[RagKV], Any]] = {
    "an engine": lambda kv: kv,
    "a LangChain model": lambda kv: ChatRagKV(kv=kv),
    "a LangChain retriever": retriever,
    "a LangChain retriever of an engine": lambda kv: retriever(kv).model_copy(
        update={"llm": None, "kv": kv}
    ),
    "a LlamaIndex model": lambda kv: RagKVLLM(kv=kv),
    "a LlamaIndex retriever": lambda kv: LlamaIndexRetriever(
        None, RagKVLLM(kv=kv), CallbackManager()
    ),
}


@pytest.mark.parametrize("over", OVER)
def test_a_block_ends_within_a_layer(make_engine, over):
    kv = make_engine(reuse=ReuseConfig())
    pause, stops = Pause(kv, "ragkv-idle"), kv._reuse.healing._idle._closed

    def go_on():
        stops.wait(30)
        pause.go.set()

    chunks = some_chunks(8)
    with OVER[over](kv):
        kv.precompute(chunks)
        kv.prefetch(chunks)
        assert pause.reached.wait(30)
        healed = sum(is_idle for is_idle, _ in pause.seen)
        threading.Thread(target=go_on).start()
    assert sum(is_idle for is_idle, _ in pause.seen) == healed + 1
    with pytest.raises(ClosedError):
        kv.generate("The")
