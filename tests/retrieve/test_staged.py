"""An index searched in steps finds what it finds at once."""

import sys
from typing import Any

import faiss
import numpy as np
import pytest

from ragkv.errors import ConfigError, MissingDependencyError
from ragkv.retrieve.staged import StagedSearch

DIMENSIONS, COUNT = 16, 500
VECTORS = np.random.default_rng(0).standard_normal((COUNT, DIMENSIONS)).astype(np.float32)
QUERIES = np.random.default_rng(1).standard_normal((20, DIMENSIONS)).astype(np.float32)


def made(kind: str, metric: int) -> Any:
    index = faiss.index_factory(DIMENSIONS, kind, metric)
    index.train(VECTORS)
    if "IDMap" in kind:
        index.add_with_ids(VECTORS, np.arange(COUNT) * 3 + 1)
    else:
        index.add(VECTORS)
    inner = faiss.downcast_index(index.index if "IDMap" in kind else index)
    if "IVF" in kind:
        inner.nprobe = 8
    return index


def embed(query: str) -> Any:
    return QUERIES[int(query)]


@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT])
@pytest.mark.parametrize(
    "kind",
    ["IVF16,Flat", "IVF16,SQ8", "IDMap,IVF16,Flat", "HNSW8", "IDMap,HNSW8", "Flat", "IDMap,Flat"],
)
def test_the_last_step_is_the_whole_search(kind, metric):
    index = made(kind, metric)
    names = {label: f"text {label}" for label in range(3 * COUNT + 1)}
    search = StagedSearch(index, names, embed, k=5, steps=4)
    for number, query in enumerate(QUERIES):
        *_, last = search(str(number))
        distances, labels = index.search(query[None], 5)
        assert [hit.item for hit in last] == [names[label] for label in labels[0]]
        sign = 1 if metric == faiss.METRIC_INNER_PRODUCT else -1
        assert [hit.score for hit in last] == pytest.approx((sign * distances[0]).tolist())


def test_steps_come_nearer():
    search = StagedSearch(made("IVF16,Flat", faiss.METRIC_L2), range(COUNT), embed, k=5, steps=4)
    found = [list(search(str(number))) for number in range(len(QUERIES))]
    assert {len(steps) for steps in found} == {4}
    scores = np.array([[sum(hit.score for hit in step) for step in steps] for steps in found])
    assert (np.diff(scores) >= 0).all()
    assert any(steps[0] != steps[-1] for steps in found)


def test_few_vectors_and_few_clusters():
    index = faiss.index_factory(DIMENSIONS, "IVF2,Flat")
    index.train(VECTORS)
    index.add(VECTORS[:3])
    index.nprobe = 2
    steps = list(StagedSearch(index, ["a", "b", "c"], embed, k=5, steps=4)("0"))
    assert len(steps) == 2
    assert sorted(hit.item for hit in steps[-1]) == ["a", "b", "c"]


@pytest.mark.parametrize("wrong", [{"k": 0}, {"steps": 0}])
def test_counts_below_one(wrong):
    with pytest.raises(ConfigError, match="1 or more"):
        StagedSearch(made("Flat", faiss.METRIC_L2), range(COUNT), embed, **wrong)


def test_without_faiss(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '.*\[retrieval\]'"):
        StagedSearch(None, [], embed)
