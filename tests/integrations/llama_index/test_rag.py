import asyncio
import pickle
import re
import socket
import time
from multiprocessing.context import SpawnContext

import pytest
import torch
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import (
    MetadataMode,
    TextNode,
    TransformComponent,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.llms.huggingface import HuggingFaceLLM
from llama_index.llms.ragkv import (
    RagKVLLM,
    RagKVPromptHelper,
    RagKVRetriever,
    RagKVTransform,
)
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV, StoreConfig
from ragkv.errors import ConfigError

QUESTION = "What is a target list?"
SIZE = {"max_new_tokens": 12, "context_window": 4000, "generate_kwargs": {"do_sample": False}}


class Words(BaseEmbedding):
    """Counts letters: enough to rank, the same everywhere."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return [1.0 + text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class Counting(TransformComponent):
    """Counts how often it is not skipped."""

    _calls: int = PrivateAttr(default=0)

    def __call__(self, nodes, **kwargs):
        self._calls += 1
        return nodes

    @property
    def calls(self):
        return self._calls


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Nothing may be downloaded."""

    def refuse(self, address):
        if self.family != socket.AF_UNIX:
            raise AssertionError(f"connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def kv(make_engine):
    """Return an engine to which a prompt is new every time."""
    return make_engine(store=StoreConfig(":memory:", history_bytes=0))


def nodes(count=6):
    return [
        TextNode(
            text=f"\n{text}\n",
            id_=f"n{i}",
            metadata={"page": i, "secret": "x"},
            excluded_llm_metadata_keys=["secret"],
        )
        for i, text in enumerate(some_chunks(count))
    ]


def read(node):
    return node.get_content(MetadataMode.LLM).strip()


def documents():
    return [Document(text=text, doc_id=f"d{i}") for i, text in enumerate(some_chunks(4, 80))]


def splitter():
    return TokenTextSplitter(chunk_size=60, chunk_overlap=0, tokenizer=str.split)


# ---- ingestion


def test_the_transform_computes_what_the_llm_will_read(kv):
    llm = RagKVLLM(kv=kv, **SIZE)
    given = nodes()
    assert RagKVTransform(llm=llm)([*given, TextNode(text=" ")])[:6] == given
    assert all(kv.contains(read(node)) for node in given)
    assert read(given[0]).startswith("page: 0\n\n")
    assert not kv.contains(given[0].text)


def test_the_transform_uses_the_llm_s_sink(kv):
    llm = RagKVLLM(kv=kv, sink_from="default", **SIZE)
    RagKVTransform(llm=llm)(nodes(1))
    assert kv.contains(read(nodes(1)[0]), sink=llm.sink)
    assert not kv.contains(read(nodes(1)[0]))


def test_the_transform_does_not_block_the_event_loop(kv, monkeypatch):
    import threading

    ticked = threading.Event()
    real = kv.precompute

    def waiting(*args, **kwargs):
        assert ticked.wait(timeout=10), "the event loop stood still"
        return real(*args, **kwargs)

    monkeypatch.setattr(kv, "precompute", waiting)
    step = RagKVTransform(llm=RagKVLLM(kv=kv, **SIZE))

    async def tick():
        await asyncio.sleep(0.001)
        ticked.set()

    async def both():
        await asyncio.gather(step.acall(nodes(1)), tick())

    asyncio.run(both())
    assert kv.contains(read(nodes(1)[0]))


def test_worker_processes_fill_the_store(folder, tmp_path, monkeypatch):
    """Started anew, one at a time; two that are forked: test_by_document.py."""
    pool = SpawnContext.Pool
    monkeypatch.setattr(SpawnContext, "Pool", lambda context, *_, **__: pool(context, 1))
    llm = RagKVLLM(
        model_name=folder, store=tmp_path / "store", completion_to_prompt=lambda text: text, **SIZE
    )
    pipeline = IngestionPipeline(transformations=[splitter(), RagKVTransform(llm=llm)])
    made = pipeline.run(documents=documents(), num_workers=2)
    assert len(made) > 4
    again = llm.kv.precompute([read(node) for node in made])
    assert again.new == 0
    assert again.existing > 4
    prompt = "\n\n".join(read(node) for node in made[:3])
    assert llm.complete(prompt).additional_kwargs["tokens"]["reused"] > 0
    llm.kv.close()


def test_a_loaded_model_travels_by_its_name(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    llm = RagKVLLM(model=model, tokenizer=tiny_tokenizer(), store=tmp_path / "store", **SIZE)
    step = pickle.loads(pickle.dumps(RagKVTransform(llm=llm)))
    assert step._source.engine is None
    step(nodes(2))
    assert step._source.engine.loaded.model.dtype == torch.float64
    assert all(llm.kv.contains(read(node)) for node in nodes(2))
    step._source.engine.close()
    llm.kv.close()


def test_an_llm_can_be_pickled(folder, tmp_path):
    llm = RagKVLLM(model_name=folder, store=tmp_path / "store", sink_from="default", **SIZE)
    copy = pickle.loads(pickle.dumps(llm))
    assert copy.complete("A target").text == llm.complete("A target").text
    assert copy.kv is not llm.kv
    assert copy.kv.reuse == llm.kv.reuse
    copy.kv.close()
    llm.kv.close()


@pytest.mark.parametrize("case", ["nameless", "memory", "memory config", "engine"])
def test_what_no_other_process_could_do_is_said(kv, tmp_path, case):
    loaded = {"model": tiny_model(), "tokenizer": tiny_tokenizer()}
    llm = {
        "nameless": lambda: RagKVLLM(**loaded, store=tmp_path),
        "memory": lambda: RagKVLLM(**loaded, model_name="m", store=":memory:"),
        "memory config": lambda: RagKVLLM(**loaded, model_name="m", store=StoreConfig(":memory:")),
        "engine": lambda: RagKVLLM(kv=kv),
    }[case]()
    mend = {"nameless": "model_name=", "engine": "model_name="}.get(case, "store=")
    pipeline = IngestionPipeline(transformations=[RagKVTransform(llm=llm)])
    with pytest.raises(ConfigError, match=mend):
        pickle.dumps(pipeline.transformations[0])
    llm.kv.close()


def test_a_second_run_that_skips_the_step_loses_nothing(make_engine, tmp_path):
    kv = make_engine(store=tmp_path / "store")
    llm = RagKVLLM(kv=kv, **SIZE)
    pipeline = IngestionPipeline(
        transformations=[splitter(), RagKVTransform(llm=llm)],
        docstore=SimpleDocumentStore(),
        docstore_strategy="duplicates_only",
    )
    made = pipeline.run(documents=documents())
    assert made
    pipeline.persist(str(tmp_path / "pipeline"))
    kv.close()

    with RagKV(kv.loaded.model, kv.tokenizer, store=tmp_path / "store") as engine:
        llm = RagKVLLM(kv=engine, **SIZE)
        again = IngestionPipeline(
            transformations=[splitter(), RagKVTransform(llm=llm)],
            docstore=SimpleDocumentStore(),
            docstore_strategy="duplicates_only",
        )
        again.load(str(tmp_path / "pipeline"))
        assert again.run(documents=documents()) == []
        assert llm.complete(read(made[0]) + "\n").additional_kwargs["tokens"]["reused"] > 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("lost", ["other store", "expired", "edited", "forgotten"])
def test_the_pipeline_s_cache_does_not_skip_the_step(make_engine, lost, asynchronous):
    """It cannot know what the store still holds; what comes after the step may be skipped."""
    kv = make_engine()
    embedder = Counting()

    def step(kv, expires_in=None):
        return RagKVTransform(llm=RagKVLLM(kv=kv, **SIZE), by_document=True, expires_in=expires_in)

    first_step = step(kv, expires_in=0.01 if lost == "expired" else None)
    pipeline = IngestionPipeline(transformations=[splitter(), first_step, embedder])

    def run(text):
        document = Document(text=text, id_="d")
        if asynchronous:
            return asyncio.run(pipeline.arun(documents=[document]))
        return pipeline.run(documents=[document])

    text = " ".join(some_chunks(2, 50))
    first = run(text)
    if lost == "other store":
        kv = make_engine()
        pipeline.transformations[1] = step(kv)
    elif lost == "expired":
        time.sleep(0.02)
        assert not kv.contains(read(first[0]))
        pipeline.transformations[1] = step(kv)
    elif lost == "edited":
        run(" ".join(some_chunks(4, 50)[2:]))
        assert not kv.contains(read(first[0]))
    else:
        assert kv.forget(document="d") > 0
    calls = embedder.calls
    again = run(text)
    assert all(kv.contains(read(node)) for node in again)
    assert [node.text for node in again] == [node.text for node in first]
    assert embedder.calls == calls


# ---- retrieval


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_retriever_names_what_it_found(kv, monkeypatch, asynchronous):
    named = []
    monkeypatch.setattr(kv, "prefetch", lambda texts, **_: named.extend(texts))
    llm = RagKVLLM(kv=kv, **SIZE)
    inner = VectorStoreIndex(nodes(), embed_model=Words()).as_retriever(similarity_top_k=3)
    retriever = RagKVRetriever(retriever=inner, llm=llm)
    found = (
        asyncio.run(retriever.aretrieve(QUESTION)) if asynchronous else retriever.retrieve(QUESTION)
    )
    assert [item.node_id for item in found] == [item.node_id for item in inner.retrieve(QUESTION)]
    assert named == [read(item.node) for item in found]


# ---- packing


TEMPLATE = PromptTemplate("Context:\n{context_str}\nQuery: {query_str}\nAnswer: ")


def test_packing_keeps_chunks_whole_and_in_order(kv):
    llm = RagKVLLM(kv=kv, **SIZE)
    texts = [read(node) for node in nodes(10)]
    helper = RagKVPromptHelper.from_llm(llm)
    assert helper.repack(TEMPLATE, texts) == ["\n\n".join(texts)]
    assert helper.repack(TEMPLATE, texts) == PromptHelper.from_llm_metadata(llm.metadata).repack(
        TEMPLATE, texts
    )

    limit = 3 * max(len(kv.tokenizer(text)["input_ids"]) for text in texts)
    helper = RagKVPromptHelper.from_llm(llm, chunk_size_limit=limit)
    pieces = helper.repack(TEMPLATE, [*texts[:5], "  ", *texts[5:]])
    assert len(pieces) > 2
    assert "\n\n".join(pieces) == "\n\n".join(texts)
    assert all(any(text in piece for piece in pieces) for text in texts)
    assert all(len(kv.tokenizer(piece)["input_ids"]) <= limit for piece in pieces)
    assert helper.repack(TEMPLATE, []) == [""]


def test_only_a_chunk_beyond_the_window_is_cut(kv):
    llm = RagKVLLM(kv=kv, **SIZE)
    small, other = (read(node) for node in nodes(2))
    limit = 2 * len(kv.tokenizer(small)["input_ids"])
    huge = " ".join(some_chunks(1, 400))
    pieces = RagKVPromptHelper.from_llm(llm, chunk_size_limit=limit).repack(
        TEMPLATE, [small, huge, other]
    )
    assert pieces[0] == small
    assert huge.startswith(pieces[1])
    assert pieces[-1].endswith(other)
    lengths = [len(kv.tokenizer(piece)["input_ids"]) for piece in pieces]
    assert max(lengths) <= limit + 5, "LlamaIndex's splitter counts word by word"


@pytest.mark.parametrize("aligned", [True, False])
def test_compact_on_overflow(make_engine, aligned):
    """Ten nodes overflow the window: whole chunks are all reused, cut ones are not."""
    kv = make_engine()
    llm = RagKVLLM(kv=kv, max_new_tokens=4, context_window=1600, recompute_ratio=0.0)
    RagKVTransform(llm=llm)(nodes(10))
    index = VectorStoreIndex(nodes(10), embed_model=Words())
    helper = RagKVPromptHelper.from_llm(llm)
    if not aligned:
        tokenizer = helper._token_counter.tokenizer
        helper = PromptHelper.from_llm_metadata(llm.metadata, tokenizer=tokenizer)
    reports = []
    real = kv.generate

    def noting(prompt, **kwargs):
        completion = real(prompt, **kwargs)
        reports.append((prompt, completion.report))
        return completion

    kv.generate = noting
    synthesizer = get_response_synthesizer(llm=llm, response_mode="compact", prompt_helper=helper)
    RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=10), response_synthesizer=synthesizer
    ).query(QUESTION)
    texts = [read(node) for node in nodes(10)]
    contexts = [re.search(r"(?s)-{9,}\n(.*?)\n-{9,}", prompt)[1] for prompt, _ in reports]
    assert len(contexts) > 1
    rests = [re.sub("|".join(map(re.escape, texts)), "", context) for context in contexts]
    assert (not "".join(rests).strip()) is aligned, "each context is whole chunks and nothing else"
    used = [use for _, report in reports for use in report.chunks]
    reused = sum(use.reused for use in used)
    tokens = sum(len(kv.tokenizer(context)["input_ids"]) for context in contexts)
    assert sorted(use.text for use in used) == sorted(texts) or not aligned
    assert (reused > 0.97 * tokens) is aligned


# ---- the swap


def pipeline(llm):
    """Written against HuggingFaceLLM; knows nothing of ragkv."""
    index = VectorStoreIndex(nodes(), embed_model=Words())
    return str(index.as_query_engine(llm=llm, similarity_top_k=3).query(QUESTION))


@pytest.mark.parametrize("is_chat_model", [False, True])
def test_the_swap_changes_one_line_and_no_answer(folder, tmp_path, is_chat_model):
    settings = {
        "model_name": folder,
        "tokenizer_name": folder,
        "is_chat_model": is_chat_model,
        **SIZE,
    }
    ordinary = pipeline(HuggingFaceLLM(**settings))
    store = StoreConfig(tmp_path / "store", history_bytes=0)
    llm = RagKVLLM(**settings, recompute_ratio=1.0, store=store)
    RagKVTransform(llm=llm)(nodes())
    assert pipeline(llm) == ordinary != ""
    assert llm.last_report.tokens.recomputed > 0
    assert len(llm.last_report.chunks) == 3
    llm.recompute_ratio = 0.2
    assert pipeline(llm)
    assert llm.last_report.tokens.reused > llm.last_report.tokens.recomputed
    assert not llm.last_report.warnings
    llm.kv.close()
