"""What LlamaIndex writes into prompts beside the text of nodes, and instead of it."""

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.evaluation import FaithfulnessEvaluator
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.llms.ragkv import RagKVLLM, RagKVPostprocessor, RagKVRetriever, RagKVTransform
from tiny import some_chunks

CHUNKS = some_chunks(4, 60)
QUESTION = "What is a target list?"
NONE = MetadataMode.NONE


@pytest.fixture
def llm(kv):
    return RagKVLLM(kv=kv, max_new_tokens=4, context_window=4000, recompute_ratio=0.0)


def nodes():
    return [TextNode(text=text, metadata={"page": 7}) for text in some_chunks(3, 60)]


def windows(llm, **settings):
    text = " ".join(f"{chunk.rstrip('.')}." for chunk in some_chunks(5, 40))
    parser = SentenceWindowNodeParser.from_defaults(window_size=1)
    pipeline = IngestionPipeline(transformations=[parser, RagKVTransform(llm=llm, **settings)])
    return pipeline.run(documents=[Document(text=text, metadata={"page": 7})])


def test_a_faithfulness_evaluator_s_chunks(llm):
    RagKVTransform(llm=llm)(nodes())
    RagKVTransform(llm=llm, metadata_mode=NONE)(nodes())
    response = VectorStoreIndex(nodes()).as_query_engine(llm=llm, similarity_top_k=1).query("?")
    assert len(llm.last_report.chunks) == 1
    FaithfulnessEvaluator(llm=llm).evaluate_response(query=QUESTION, response=response)
    assert len(llm.last_report.chunks) == 1


def test_windows_that_replace_sentences(llm):
    made = windows(llm, metadata_key="window")
    assert any(node.text != node.metadata["window"] for node in made)
    engine = VectorStoreIndex(made).as_query_engine(
        llm=llm,
        similarity_top_k=2,
        node_postprocessors=[MetadataReplacementPostProcessor("window")],
    )
    engine.query(QUESTION)
    assert len(llm.last_report.chunks) == 2
    assert llm.last_report.tokens.fresh < llm.last_report.tokens.reused


def test_the_step_leaves_nodes_as_they_are(llm):
    made = windows(llm, metadata_key="window")
    assert [node.text for node in made] == [node.metadata["original_text"] for node in made]
    plain = nodes()
    RagKVTransform(llm=llm, metadata_key="window", metadata_mode=NONE)(plain)
    assert all(llm.kv.contains(node.text) for node in plain), "without the field, the text"


def test_the_retriever_names_what_will_stand_in_the_prompt(kv, llm, monkeypatch):
    named = []
    monkeypatch.setattr(kv, "prefetch", lambda texts, **_: named.extend(texts))
    inner = VectorStoreIndex(nodes()).as_retriever(similarity_top_k=3)
    found = RagKVRetriever(inner, llm, metadata_mode=NONE).retrieve(QUESTION)
    assert named == [item.node.text for item in found]
    del named[:]
    made = windows(llm)
    inner = VectorStoreIndex(made).as_retriever(similarity_top_k=2)
    found = RagKVRetriever(inner, llm, metadata_mode=NONE, metadata_key="window").retrieve("?")
    assert named == [item.node.metadata["window"].strip() for item in found]


def test_the_postprocessor_names_what_will_stand_in_the_prompt(kv, llm, monkeypatch):
    named = []
    monkeypatch.setattr(kv, "prefetch", lambda texts, **_: named.extend(texts))
    step = RagKVPostprocessor(llm=llm, metadata_mode=NONE)
    found = [NodeWithScore(node=node) for node in nodes()]
    assert step.postprocess_nodes(found) == found
    assert named == some_chunks(3, 60)
    del named[:]
    step = RagKVPostprocessor(llm=llm, metadata_key="window")
    step.postprocess_nodes([NodeWithScore(node=TextNode(text="a", metadata={"window": "w x y"}))])
    assert named == ["window: w x y\n\nw x y"]


def test_a_missing_window_is_made_up_after_an_answer(kv, llm):
    index = VectorStoreIndex(windows(llm))
    engine = RetrieverQueryEngine.from_args(
        RagKVRetriever(index.as_retriever(similarity_top_k=2), llm, metadata_key="window"),
        llm=llm,
        node_postprocessors=[MetadataReplacementPostProcessor("window")],
    )
    engine.query(QUESTION)
    kv.wait()
    engine.query(QUESTION)
    assert len(llm.last_report.chunks) == 2
