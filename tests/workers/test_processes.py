"""Workers in processes: killed ones, documents that kill, errors, a parent that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from ingesting import StandIn

from ragkv.ingest.documents import Document
from ragkv.workers import worker
from ragkv.workers.worker import store_in_processes

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
    code = "import pathlib, sys, test_processes as t\nt.stored(pathlib.Path(sys.argv[1]), 'slow')"
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", code, str(tmp_path)]
    parent = subprocess.Popen(command, env=os.environ | path, stderr=subprocess.DEVNULL)
    for begun in (True, False):
        while bool(alive(tmp_path)) != begun:
            time.sleep(0.02)
        parent.kill()
    parent.wait()
