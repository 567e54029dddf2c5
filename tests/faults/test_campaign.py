"""The fault campaign, in short: each fault once, and a moment of threads and processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from campaign import world
from campaign.faults import FAULTS
from campaign.run import run_campaign
from campaign.stress import run_stress
from children import needs_children
from store_entries import without_syncs  # noqa: F401

pytestmark = [pytest.mark.usefixtures("without_syncs"), needs_children]


@pytest.fixture(autouse=True)
def _versions_are_placed(monkeypatch) -> None:
    monkeypatch.setattr(*world.PLACED)


def test_each_fault_once():
    found = run_campaign(len(FAULTS))
    assert [outcome.runs for outcome in found.values()] == [1] * len(FAULTS)
    assert all(outcome.answers for outcome in found.values())
    assert not [line for o in found.values() for line in o.wrong + o.lost]


def test_threads_and_processes(tmp_path: Path):
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
