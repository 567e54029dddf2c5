"""Workers that are killed, one with an engine and one without a model."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ragkv.ingest.documents import Document
from ragkv.workers.worker import IngestWorker, Row

KILLED = "RAGKV_TEST_KILLED"
"""Environment variable: a file that is made when a worker is killed; if "node", its Ray node is."""


class StandIn:
    """Stores a document as a file of its name; is killed by a "fatal" one, "once" or always."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        self.folder = folder
        (folder / f"process {os.getpid()}").touch()

    def store(self, documents: list[Document]) -> list[Row]:
        for name in (str(document.name) for document in documents):
            again = self.folder / "again"
            if name == "fatal" or (name == "fatal once" and not again.exists()):
                again.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60 if name == "slow" else 0.01)
            (self.folder / name).touch()
        return [{"document": document.name, "status": "stored"} for document in documents]


class Killed(IngestWorker):
    """The first of several to store its second batch is killed before it says so."""

    batches = 0

    def store(self, documents: Any) -> list[Row]:
        rows, mark = super().store(documents), Path(os.environ[KILLED])
        self.batches += 1
        if self.batches == 2:
            with suppress(FileExistsError), mark.open("x", encoding="ascii"):
                os.kill(os.getppid() if mark.name == "node" else os.getpid(), signal.SIGKILL)
                time.sleep(60)
        return rows


def assert_alike(*engines: Any) -> None:
    """Demand the same entries, documents and answers of two engines."""
    stored = [{e.text: (e.nbytes, e.documents) for e in kv._store.entries()} for kv in engines]
    assert stored[0] == stored[1]
    for text in stored[0]:
        corpora = [kv._reuse.corpus for kv in engines]
        entries = [
            each.get(text, each.sinks.configured(engines[0].reuse)).entry for each in corpora
        ]
        found = [(entry.keys, entry.values) for entry in entries]
        assert all((a - b).abs().max() < 1e-4 for a, b in zip(*found, strict=True))
    prompt = "\n\n".join([*list(stored[0])[:3], "What?"])
    asked = [kv.generate(prompt, max_new_tokens=8, history=False) for kv in engines]
    assert asked[0].token_ids == asked[1].token_ids
    assert asked[0].report.tokens.reused == asked[1].report.tokens.reused > 0
