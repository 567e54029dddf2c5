"""What a worker says of the documents that it was given."""

import time
from functools import partial

import pytest
from tiny import some_chunks

from ragkv.ingest.documents import Document
from ragkv.workers.worker import IngestWorker, total

CHUNKS = some_chunks(6)


@pytest.fixture
def ingest(make_engine, tmp_path) -> IngestWorker:
    opened = partial(make_engine, store=tmp_path, layers=2)
    return IngestWorker(opened, threads=1, expires_in=3600)


def test_a_row_says_what_became_of_a_document(ingest):
    ingest.store([Document([CHUNKS[0]])])
    expected = {
        "existing": [CHUNKS[0]],
        "stored": [f" {CHUNKS[1]}\n"],
        "stored, in part": CHUNKS[:3],
        "skipped": ["short"],
        "skipped, empty": [],
        "failed": ["\ud800" + CHUNKS[4]],
        "stored behind it": [CHUNKS[5]],
    }
    rows = ingest.store([Document(texts, name) for name, texts in expected.items()])
    assert [row["document"] for row in rows] == list(expected)
    assert all(row["document"].startswith(row["status"]) for row in rows)
    assert all(bool(row["reason"]) == (row["status"] == "failed") for row in rows)
    assert (total(rows, 2.5).new, total(rows, 2.5).skipped, total(rows, 2.5).seconds) == (3, 1, 2.5)
    stored, kv = [*CHUNKS[:3], CHUNKS[5]], ingest._kv
    assert all(3000 < kv._store.expiry(text) - time.time() < 3601 for text in stored)


def test_former_chunks_of_a_document_go(ingest):
    first = ingest.store([Document(CHUNKS[:2], "whole"), Document(CHUNKS[1:3], "other")])
    assert [row["new"] for row in first] == [3, 0]
    assert ingest.store([Document(CHUNKS[3:4], "whole")])[0]["removed"] == 1
    assert [ingest._kv.contains(text) for text in CHUNKS[:4]] == [False, True, True, True]
