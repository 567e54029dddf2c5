"""The fault campaign, in short: each fault once, and a moment of threads and processes."""

import random

import pytest
import torch
from campaign import replicas, world
from campaign.case import Case
from campaign.faults import FAULTS
from campaign.run import run_campaign
from campaign.stress import run_stress
from children import needs_children
from store_entries import without_syncs  # noqa: F401

from ragkv.config import StoreConfig
from ragkv.errors import StoreError

pytestmark = [pytest.mark.usefixtures("without_syncs"), needs_children]

SLOW = [pytest.param(harm, marks=pytest.mark.slow) for harm in (replicas.cut_off, replicas.slow)]


def test_each_fault_once():
    found = run_campaign(len(FAULTS))
    assert [outcome.runs for outcome in found.values()] == [1] * len(FAULTS)
    assert all(outcome.answers for outcome in found.values())
    assert not [line for o in found.values() for line in o.wrong + o.lost]


@pytest.mark.parametrize("harm", [replicas.restarted, *SLOW])
def test_a_timeout_before_the_harm_is_no_wrong_answer(harm, tmp_path, monkeypatch):
    """A busy machine can answer a store's first calls later than the far replica waits."""
    timeouts, own = iter([1, 1]), replicas.engine

    def engine(config):
        if replicas.redis.TIMEOUT_S == replicas._PATIENCE_S and next(timeouts, None):
            raise StoreError("timed out")
        return own(config)

    monkeypatch.setattr(replicas, "engine", engine)
    case = Case(tmp_path, StoreConfig(tmp_path / "store"), random.Random(3), set())
    harm(case)
    assert next(timeouts, None) is None
    assert case.outcome.struck
    assert not case.outcome.wrong + case.outcome.lost


def test_threads_and_processes(tmp_path):
    found = run_stress(2.0, tmp_path)
    assert not found.wrong
    assert found.counts["answers"]
    assert found.counts["hits"]
    assert found.counts["puts"]


def test_a_wrong_answer_would_be_seen():
    question = world.Question((0, 1, 2), 0.3)
    with world.engine(":memory:") as kv:
        for chunk in (0, 1):
            world.precompute(kv, chunk)
        answer = world.ask(kv, question)
        assert world.wrong(question, answer) == ""
        entry = kv._store.get(world.TEXTS[0], world.sink_of(kv).fingerprint).entry
        entry.values.add_(1e-3)
        assert "logits" in world.wrong(question, world.ask(kv, question))
    assert answer.known == {(0, "entry"), (1, "version")}
    assert not torch.equal(answer.logits, torch.zeros_like(answer.logits))
