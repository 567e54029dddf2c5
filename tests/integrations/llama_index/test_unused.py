"""LlamaIndex: chunks that were retrieved and not reused are in the answer's metadata."""

import asyncio
import textwrap

import pytest
from llama_index.core import StorageContext
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import (
    MetadataReplacementPostProcessor,
    SimilarityPostprocessor,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import AutoMergingRetriever, BaseRetriever
from llama_index.core.schema import Document, NodeWithScore, QueryBundle, TextNode
from llama_index.llms.ragkv import RagKVLLM, RagKVPostprocessor, RagKVRetriever, RagKVTransform
from tiny import some_chunks

from ragkv.report.reasons import REASONS

TEXTS = [f"{text}\n  and so on, {at} times." for at, text in enumerate(some_chunks(3))]
QUESTION = "What is a target?"


class Fixed(BaseRetriever):
    """Finds all nodes, the later ones with lower scores."""

    def __init__(self, nodes):
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle):
        return [NodeWithScore(node=node, score=1 / (1 + at)) for at, node in enumerate(self._nodes)]


class Changed(BaseNodePostprocessor):
    """Changes the first node's text."""

    change: object

    def _postprocess_nodes(self, nodes, query_bundle=None):
        first = TextNode(text=self.change(nodes[0].node.text))
        return [NodeWithScore(node=first, score=1.0), *nodes[1:]]


class Answers:
    """A model, its nodes, and the metadata of its answers."""

    def __init__(self, kv, **metadata):
        self.llm = RagKVLLM(kv=kv, max_new_tokens=2, context_window=4000)
        self.nodes = [TextNode(text=text, metadata=metadata) for text in TEXTS]
        self.retriever = RagKVRetriever(Fixed(self.nodes), self.llm)

    def ingested(self):
        RagKVTransform(llm=self.llm)(self.nodes)
        return self

    def query(self, mode="compact", **settings):
        synthesizer = get_response_synthesizer(llm=self.llm, response_mode=mode)
        engine = RetrieverQueryEngine(
            **{"retriever": self.retriever, "response_synthesizer": synthesizer, **settings}
        )
        engine.query(QUESTION)
        return self.reasons

    @property
    def reasons(self):
        misses = self.llm.last_report.misses
        assert all(miss.mend.startswith(REASONS[miss.reason].mend) for miss in misses)
        return [miss.reason for miss in misses]


@pytest.mark.parametrize("metadata", [{}, {"page": 3}, {"file": "a.md", "page": 3}])
def test_simple_summarize_writes_a_list(make_engine, metadata, caplog):
    answers = Answers(make_engine(), **metadata).ingested()
    assert answers.query("simple_summarize") == ["list"] * 3
    assert "`compact` instead of `simple_summarize`" in caplog.text
    named_by_none = {"retriever": Fixed(answers.nodes)}
    assert answers.query("simple_summarize", **named_by_none) == ["list"] * 3
    assert answers.query("compact") == []


@pytest.mark.parametrize(
    ("size", "metadata", "expected"),
    [
        (512, {"page": 3}, {"metadata"}),
        (512, {"file": "a.md", "page": 3}, {"metadata"}),
        (50, {"page": 3}, {"pieces"}),
        (50, {}, {"pieces"}),
        (512, {}, set()),
    ],
)
def test_the_citation_query_engine(make_engine, size, metadata, expected):
    answers = Answers(make_engine(), **metadata).ingested()
    engine = CitationQueryEngine.from_args(
        None,
        llm=answers.llm,
        retriever=answers.retriever,
        citation_chunk_size=size,
        citation_chunk_overlap=0,
    )
    engine.query(QUESTION)
    assert set(answers.reasons) == expected
    assert len(answers.reasons) == 3 * bool(expected)


@pytest.mark.parametrize("way", ["sync", "async", "stream"])
def test_a_postprocessor_that_changes_texts(make_engine, way):
    answers = Answers(make_engine()).ingested()
    engine = RetrieverQueryEngine.from_args(
        answers.retriever,
        llm=answers.llm,
        node_postprocessors=[Changed(change=str.lower)],
        streaming=way == "stream",
    )
    if way == "async":
        asyncio.run(engine.aquery(QUESTION))
    else:
        response = engine.query(QUESTION)
        if way == "stream":
            assert list(response.response_gen) is not None
    assert answers.reasons == ["case"]


@pytest.mark.parametrize("metadata", [{}, {"page": 3}, {"file": "a.md", "page": 3}])
@pytest.mark.parametrize("named_last", [False, True])
def test_nodes_that_are_replaced_by_a_window(make_engine, metadata, named_last):
    answers = Answers(make_engine())
    parser = SentenceWindowNodeParser(window_size=1, sentence_splitter=str.splitlines)
    document = Document(text=textwrap.fill(" ".join(TEXTS), 60), metadata=metadata)
    answers.nodes = parser.get_nodes_from_documents([document])[1:5:3]
    answers.retriever = RagKVRetriever(Fixed(answers.nodes), answers.llm)
    replaced: list[BaseNodePostprocessor] = [MetadataReplacementPostProcessor("window")]
    if named_last:
        replaced.append(RagKVPostprocessor(answers.llm))
        answers.retriever = Fixed(answers.nodes)
    found = answers.ingested().query(node_postprocessors=replaced)
    assert found == ["absent" if named_last else "enlarged"] * 2 * bool(metadata or named_last)


@pytest.mark.parametrize("metadata", [{}, {"page": 3}])
def test_nodes_that_are_merged_into_their_parent(make_engine, metadata):
    answers = Answers(make_engine())
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[400, 100], chunk_overlap=0)
    document = Document(text=" ".join(TEXTS), metadata=metadata)
    parents = parser.get_nodes_from_documents([document])
    answers.nodes = get_leaf_nodes(parents)
    assert 2 < len(answers.nodes) < len(parents)
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents(parents)
    named = RagKVRetriever(Fixed(answers.nodes), answers.llm)
    answers.retriever = AutoMergingRetriever(named, storage)
    assert set(answers.ingested().query()) == ({"enlarged"} if metadata else set())


def test_nodes_that_are_dropped(make_engine):
    answers = Answers(make_engine()).ingested()
    cutoff = [SimilarityPostprocessor(similarity_cutoff=0.5)]
    assert answers.query(node_postprocessors=cutoff) == ["left_out"]
    last = [*cutoff, RagKVPostprocessor(answers.llm)]
    assert answers.query(node_postprocessors=last, retriever=Fixed(answers.nodes)) == []
    template = PromptTemplate("Question: {query_str}")
    synthesizer = get_response_synthesizer(llm=answers.llm, text_qa_template=template)
    assert answers.query(response_synthesizer=synthesizer) == ["left_out"] * 3


def test_each_call_of_refine_accounts_for_its_own(make_engine, reports):
    answers = Answers(make_engine()).ingested()
    answers.query("refine")
    found = [[miss.reason for miss in each.misses] for each in reports]
    assert found == [["left_out"] * 2, [], []]


def test_what_the_prompt_helper_cuts(make_engine, reports):
    answers = Answers(make_engine())
    answers.nodes = [TextNode(text="\n".join(some_chunks(12)[at::3])) for at in range(3)]
    answers.llm.context_window = 900
    answers.retriever = RagKVRetriever(Fixed(answers.nodes), answers.llm)
    answers.ingested().query("compact")
    assert len(reports) > 1
    found = {miss.reason for each in reports for miss in each.misses}
    assert "cut" in found


def test_nodes_that_are_not_stored(make_engine):
    kv = make_engine()
    answers = Answers(kv)
    assert answers.query() == ["absent"] * 3
    assert all(miss.stored_next for miss in answers.llm.last_report.misses)
    kv.wait()
    assert answers.query() == []
    kv.forget(TEXTS[0])
    assert answers.query(retriever=RagKVRetriever(Fixed(answers.nodes[::-1]), answers.llm)) == [
        "deleted"
    ]


def test_the_metadata_of_a_response(make_engine):
    answers = Answers(make_engine()).ingested()
    answers.retriever.retrieve(QueryBundle(QUESTION))
    response = answers.llm.complete(f"Read:\n{TEXTS}\n\nWhat?")
    (first, *_) = response.additional_kwargs["misses"]
    assert first["reason"] == "list"
    assert first["mend"] == REASONS["list"].mend
    answers.retriever.retrieve(QueryBundle(QUESTION))
    *_, last = answers.llm.stream_complete(f"Read:\n{TEXTS}\n\nWhat else?")
    assert [miss["reason"] for miss in last.additional_kwargs["misses"]] == ["list"] * 3
