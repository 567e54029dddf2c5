"""``RagKVTransform(by_document=True)`` where a call sees a part of a document."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from fresh import output_of
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import (
    BaseNode,
    Document,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.llms.ragkv import RagKVLLM, RagKVTransform
from tiny import some_chunks

SPLITTER = SentenceSplitter(chunk_size=60, chunk_overlap=0)


@pytest.fixture
def llm(folder: str, tmp_path: Path) -> Any:
    """Return an LLM that other processes can make again, too."""
    made = RagKVLLM(model_name=folder, store=str(tmp_path / "store"))
    yield made
    made.kv.close()


def split(text: str, document: str = "doc") -> list[BaseNode]:
    return list(SPLITTER([Document(text=text, id_=document)]))


def by_hand(texts: list[str]) -> list[BaseNode]:
    """Return nodes that do not know their document's hash."""
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="doc")}
    return [TextNode(text=text, relationships=source) for text in texts]


def kept(llm: RagKVLLM, nodes: list[BaseNode]) -> int:
    return sum(llm.kv.contains(node.get_content(MetadataMode.LLM)) for node in nodes)


def in_workers(llm: RagKVLLM, nodes: list[BaseNode], parts: int = 2) -> None:
    """Do what the pipeline's workers do, one after the other: each has a copy and a part."""
    step = RagKVTransform(llm=llm, by_document=True)
    size = len(nodes) // parts
    for at in range(0, len(nodes), size):
        copy = pickle.loads(pickle.dumps(step))
        copy(nodes[at : at + size])
        copy._source.get().close()


FORKING = """
import asyncio, sys
import torch
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import MetadataMode
from llama_index.llms.ragkv import RagKVLLM, RagKVTransform
from test_by_document import split
from tiny import some_chunks

if __name__ == "__main__":
    torch.set_num_threads(4)
    torch.randn(600, 600).exp()  # leaves threads that a fork lacks
    llm = RagKVLLM(model_name=sys.argv[1], store=sys.argv[2])
    nodes = split(" ".join(some_chunks(4)))
    steps = [RagKVTransform(llm=llm, by_document=True)]
    pipeline = IngestionPipeline(transformations=steps, disable_cache=True)
    asyncio.run(pipeline.arun(nodes=nodes, num_workers=2))
    kept = sum(llm.kv.contains(node.get_content(MetadataMode.LLM)) for node in nodes)
    print(kept, len(nodes))
"""


def test_two_forked_workers_share_a_document(folder, tmp_path):
    """``arun`` forks where the system does; threads of the parent are not waited for."""
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    kept, nodes = map(int, output_of(FORKING, folder, tmp_path / "store", PYTHONPATH=here).split())
    assert kept == nodes > 4


def test_a_document_that_shrank_loses_its_old_chunks_in_parts_too(llm):
    parts = 2
    old = split(" ".join(some_chunks(6)))
    in_workers(llm, old, parts)
    other = split(" ".join(some_chunks(7)[6:]), "other")
    in_workers(llm, other, 1)
    text = " ".join(some_chunks(6))
    new = split(text[: len(text) // 2])
    in_workers(llm, new, parts)
    assert kept(llm, new) == len(new)
    same = {node.get_content() for node in new}
    gone = [node for node in old if node.get_content() not in same]
    assert gone
    assert kept(llm, gone) == 0
    assert kept(llm, other) == len(other)
    assert llm.kv.forget(document="doc") == len(new)


def test_batches_and_two_pipelines_over_one_document_add_up(llm):
    nodes = split(" ".join(some_chunks(4)))
    step = RagKVTransform(llm=llm, by_document=True)
    for at in range(0, len(nodes), 2):
        step(nodes[at : at + 2])
    assert kept(llm, nodes) == len(nodes)
    finer = SentenceSplitter(chunk_size=40, chunk_overlap=0)
    document = Document(text=" ".join(some_chunks(4)), id_="doc")
    again = IngestionPipeline(transformations=[finer, RagKVTransform(llm=llm, by_document=True)])
    also = list(again.run(documents=[document]))
    assert kept(llm, [*nodes, *also]) == len(nodes) + len(also)


def test_without_a_hash_a_call_has_the_whole_document_unless_in_a_worker(llm):
    texts = some_chunks(4)
    in_workers(llm, by_hand(texts))
    assert kept(llm, by_hand(texts)) == 4
    RagKVTransform(llm=llm, by_document=True)(by_hand(texts[:1]))
    assert kept(llm, by_hand(texts)) == 1


def test_ingestion_says_its_size_once_where_there_is_no_terminal(llm, capsys):
    capsys.readouterr()
    nodes = [*split(" ".join(some_chunks(2))), *split(" ".join(some_chunks(3)[2:]), "other")]
    for by_document in (True, False):
        RagKVTransform(llm=llm, by_document=by_document)(nodes)
    size, closing = capsys.readouterr().err.splitlines()
    assert size.startswith(f"ragkv: encoding {len(nodes)} chunks")
    assert closing.startswith(f"ragkv: {len(nodes)} chunks new, 0 known")
    RagKVTransform(llm=llm, show_progress=False)(split(" ".join(some_chunks(4)[3:])))
    assert not capsys.readouterr().err
