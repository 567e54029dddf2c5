"""The store of each kind, for what all of them do."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_store import DiskStore, tiered

from ragkv.store import ChunkStore, open_store
from ragkv.store.backends.memory import MemoryBackend

KINDS: dict[str, Callable[[Path], ChunkStore]] = {
    "memory": lambda _: open_store(":memory:"),
    "dictionary": lambda _: ChunkStore(MemoryBackend()),
    "disk": DiskStore,
    "disk-owned": lambda path: DiskStore(path, mapped=False),
    "tiered": tiered,
    "tiered-without-room": lambda path: tiered(path, 0),
}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChunkStore]:
    made = KINDS[request.param](tmp_path)
    yield made
    made.close()
