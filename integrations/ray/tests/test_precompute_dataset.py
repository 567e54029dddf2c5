"""A dataset stored by actors of Ray, one of which is killed, or its node is."""

from __future__ import annotations

import os
import sys

import pytest
from ingesting import KILLED, Killed, assert_alike
from tiny import saved, some_chunks

from ragkv import RagKV
from ragkv.store.names import digest_of_text

ray = pytest.importorskip("ray", reason="make ray brings it")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
ITEMS = [{"text": text, "of": f"{number // 2}"} for number, text in enumerate(some_chunks(12))]


@pytest.fixture(params=["worker", "node"])
def cluster(request, tmp_path, monkeypatch):
    """Two nodes beside a head without CPUs: actors are on these."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv(KILLED, str(tmp_path / request.param))
    monkeypatch.setattr("ragkv_ray.actors.IngestWorker", Killed)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    assert made.add_node(num_cpus=1) != made.add_node(num_cpus=1)
    ray.init(made.address, log_to_driver=False)
    yield tmp_path / request.param
    ray.shutdown()
    made.shutdown()


def test_what_dies_loses_nothing(cluster, tmp_path):
    from ragkv_ray import precompute_dataset

    model = str(tmp_path / "model")
    saved(model, layers=2)
    ds = ray.data.from_items([{**item, "at": 1} for item in ITEMS], override_num_blocks=6)
    given = {"store": tmp_path / "two", "document": "of", "revision": "at", "batch_size": 2}
    first, again = (precompute_dataset(ds, model, **given).take_all() for _ in range(2))
    assert cluster.exists()
    assert sorted(row["document"] for row in first) == sorted(item["of"] for item in ITEMS)
    digests = {digest_of_text(item["text"].strip()) for item in ITEMS}
    assert {row["digest"] for row in first} == digests
    assert {row["status"] for row in first} <= {"stored", "existing"}
    assert {row["status"] for row in again} == {"existing"}
    with RagKV(model, store=tmp_path / "one") as one, RagKV(model, store=tmp_path / "two") as two:
        for item in ITEMS:
            one.precompute([item["text"]], document=item["of"], revision="1")
        assert_alike(one, two)
