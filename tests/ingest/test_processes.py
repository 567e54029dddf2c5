"""Workers in processes: killed ones, documents that kill, errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from ingesting import StandIn

from ragkv.engine.documents import Document
from ragkv.ingest.processes import store_in_processes

NAMES = [f"document {number}" for number in range(12)]


def stored(folder: Path, *names: str, workers: int = 2) -> dict[str, str]:
    documents = [Document(["text"], name) for name in names]
    done = store_in_processes(partial(StandIn, folder), documents, workers)
    rows = [row for part in done for row in part]
    assert sorted(row["document"] for row in rows) == sorted(names)
    return {row["document"]: row["status"] for row in rows}


@pytest.mark.parametrize("place", [0, 6, 12])
def test_a_killed_worker_loses_nothing(tmp_path, place):
    rows = stored(tmp_path, *NAMES[:place], "fatal once", *NAMES[place:])
    assert set(rows.values()) == {"stored"}
    assert all((tmp_path / name).exists() for name in rows)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_that_ends_its_worker_fails_alone(tmp_path, workers):
    rows = stored(tmp_path, "fatal", *NAMES, workers=workers)
    assert rows == dict.fromkeys(NAMES, "stored") | {"fatal": "failed"}
