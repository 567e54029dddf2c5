"""Ingestion workers: their rows, killed processes, errors, a parent that ends."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from ingesting import StandIn
from tiny import some_chunks

from ragkv.ingest.documents import Document
from ragkv.workers import worker
from ragkv.workers.worker import IngestWorker, store_in_processes, total

CHUNKS = some_chunks(6)
NAMES = [f"document {number}" for number in range(12)]


def stored(folder: Path, *names: str, workers: int = 2) -> dict[str, str]:
    documents = [Document(["text"], name) for name in names]
    done = store_in_processes(partial(StandIn, folder), documents, workers)
    rows = [row for part in done for row in part]
    assert sorted(row["document"] for row in rows) == sorted(names)
    return {row["document"]: row["status"] for row in rows}


def alive(folder: Path) -> list[Path]:
    found = [Path("/proc", each.name.split()[1], "stat") for each in folder.glob("process *")]
    return [path for path in found if path.exists() and " Z " not in path.read_text()]


@pytest.mark.parametrize("place", [0, 6, 12])
def test_a_killed_worker_loses_nothing(tmp_path, place):
    rows = stored(tmp_path, *NAMES[:place], "fatal once", *NAMES[place:])
    assert set(rows.values()) == {"stored"}
    assert all((tmp_path / name).exists() for name in rows)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_that_ends_its_worker_fails_alone(tmp_path, workers):
    rows = stored(tmp_path, "fatal", *NAMES, workers=workers)
    assert rows == dict.fromkeys(NAMES, "stored") | {"fatal": "failed"}


def test_an_engine_that_cannot_be_opened_is_an_error_of_the_call(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        stored(tmp_path / "none", *NAMES)


@pytest.mark.parametrize("workers", [2, 3])
def test_all_workers_are_busy_to_the_end(monkeypatch, workers):
    sizes = [300, *range(9), 7, 120, *range(40), 500, 3]
    monkeypatch.setattr(worker, "_run", lambda _, batches, __: iter([batches]))
    documents = [Document(["a" * size]) for size in sizes]
    batches = next(store_in_processes(lambda: None, documents, workers))
    done = [0] * workers
    for batch in batches:
        done[done.index(min(done))] += sum(len(each.texts[0]) for each in batch)
    assert sum(done) == sum(sizes)
    assert max(done) < max(520, 1.1 * sum(sizes) / workers)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
def test_workers_end_with_whoever_reads(tmp_path):
    rows = store_in_processes(partial(StandIn, tmp_path), [Document([], "a name")] * 600, 2)
    next(rows)
    rows.close()
    assert not alive(tmp_path)
    code = "import pathlib, sys, test_worker as t\nt.stored(pathlib.Path(sys.argv[1]), 'slow')"
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", code, str(tmp_path)]
    parent = subprocess.Popen(command, env=os.environ | path, stderr=subprocess.DEVNULL)
    for begun in (True, False):
        while bool(alive(tmp_path)) != begun:
            time.sleep(0.02)
        parent.kill()
    parent.wait()


@pytest.fixture
def ingest(make_engine, tmp_path) -> IngestWorker:
    opened = partial(make_engine, store=tmp_path, layers=2)
    return IngestWorker(opened, threads=1, expires_in=3600)


def test_a_row_has_a_document_s_outcome(ingest):
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


def test_previous_chunks_of_a_document_go(ingest):
    first = ingest.store([Document(CHUNKS[:2], "whole"), Document(CHUNKS[1:3], "other")])
    assert [row["new"] for row in first] == [3, 0]
    assert ingest.store([Document(CHUNKS[3:4], "whole")])[0]["removed"] == 1
    assert [ingest._kv.contains(text) for text in CHUNKS[:4]] == [False, True, True, True]
