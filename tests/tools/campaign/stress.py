"""Many threads and processes over one store, each answer and each entry compared."""

import json
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from children import Child, Say
from store_entries import FINGERPRINT, make_entry

from campaign.world import (
    TEXTS,
    ask,
    draw_questions,
    engine,
    precompute,
    sink_of,
    wrong,
)
from ragkv import RagKV
from ragkv.chunk.kv import ChunkKV
from ragkv.config import StoreConfig
from ragkv.errors import StoreFullError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store import open_chunk_store

PROCESSES, THREADS = 2, 8
_ASKING = 2  # of the threads; the others get, put and delete
_SYNTHETIC, _SYNTHETIC_TOKENS = 40, 100
_SAMPLE_S = 0.25

Stored = tuple[ChunkKV, Fingerprint]


@dataclass
class Stress:
    """What was done, what was wrong, and the most bytes that were seen of each budget."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    most_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Self) -> None:
        """Take another process's results in."""
        self.seconds = max(self.seconds, other.seconds)
        self.counts += other.counts
        self.wrong += other.wrong
        self.most_bytes |= other.most_bytes


def run_stress(seconds: float, folder: Path, seed: int = 0) -> Stress:
    """Let the processes work on a store whose budgets hold about a third of what is put."""
    entries = _entries()
    largest = max(entry.nbytes for entry, _ in entries) + 8192  # and the header
    total = sum(entry.nbytes for entry, _ in entries)
    config = StoreConfig(folder / "stress", memory_bytes=total // 6, disk_bytes=total // 3)
    with closing(open_chunk_store(config)):
        pass  # made before they race for it
    children = [Child(_say_work, config, seconds, seed + n) for n in range(PROCESSES)]
    result = Stress()
    for child in children:
        if child.end() != 0:
            result.wrong.append("a process failed")
            continue
        found = json.loads(child.said[0])
        counted = {name: Counter(found.pop(name)) for name in ("counts", "most_bytes")}
        result.add(Stress(**found, **counted))
    for name, budget in (("memory", config.memory_bytes), ("disk", config.disk_bytes or 0)):
        if result.most_bytes[name] > budget + largest:
            result.wrong.append(f"{result.most_bytes[name]} bytes in {name} for {budget}")
    return result


def _entries() -> list[Stored]:
    """Return the chunks of the questions, and others whose content follows from their text."""
    with engine(":memory:") as kv:
        for chunk in range(len(TEXTS)):
            precompute(kv, chunk)
        fingerprint = sink_of(kv).fingerprint
        found = [kv._store.get(text, fingerprint).entry for text in TEXTS]
    stored: list[Stored] = [(entry, fingerprint) for entry in found if entry is not None]
    names = [f"synthetic {number}" for number in range(_SYNTHETIC)]
    return stored + [(make_entry(n, tokens=_SYNTHETIC_TOKENS), FINGERPRINT) for n in names]


def _say_work(say: Say, config: StoreConfig, seconds: float, seed: int) -> None:
    say(json.dumps(vars(_work(config, seconds, seed))))


def _work(config: StoreConfig, seconds: float, seed: int) -> Stress:
    result, entries = Stress(), _entries()
    model = threading.Lock()  # the engine and the fresh engines share it
    begun = time.perf_counter()
    end = begun + seconds

    def until_end(step: Callable[[random.Random], None], number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        try:
            while time.perf_counter() < end:
                step(draw)
        except Exception:  # noqa: BLE001  a thread's errors would be lost
            result.wrong.append(traceback.format_exc())

    with engine(config) as kv, closing(open_chunk_store(config)) as below:

        def asking(draw: random.Random) -> None:
            (question,) = draw_questions(draw, 1)
            with model:
                difference = wrong(question, ask(kv, question))
            _count(result, "answers", difference)

        def storing(draw: random.Random) -> None:
            _store_step(kv, draw, entries, result)

        def sampling(_: random.Random) -> None:
            disk = sum(info.nbytes for info in below.entries())
            memory = kv._store.tiers[-1].nbytes
            result.most_bytes |= Counter(disk=disk, memory=memory)
            time.sleep(_SAMPLE_S)

        steps = [asking] * _ASKING + [storing] * (THREADS - _ASKING) + [sampling]
        threads = [
            threading.Thread(target=until_end, args=(step, number))
            for number, step in enumerate(steps)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    result.seconds = time.perf_counter() - begun
    return result


def _store_step(kv: RagKV, draw: random.Random, entries: list[Stored], result: Stress) -> None:
    """Get an entry, and put it where it is missing; delete one now and then."""
    expected, fingerprint = draw.choice(entries)
    if draw.random() < 0.03:
        kv._store.delete(expected.text)
        _count(result, "deletions")
        return
    found = kv._store.get(expected.text, fingerprint)
    if found.entry is not None:
        _count(result, "hits", _difference(found.entry, expected))
        return
    _count(result, f"misses ({found.reason})")
    try:
        kv._store.put(expected, fingerprint)
        _count(result, "puts")
    except StoreFullError:  # the other process took the room that was made
        _count(result, "full")


def _difference(found: ChunkKV, expected: ChunkKV) -> str:
    same = torch.equal(found.keys, expected.keys) and torch.equal(found.values, expected.values)
    return "" if same and found.text == expected.text else f"an entry of {expected.text!r} differs"


def _count(result: Stress, what: str, difference: str = "") -> None:
    with _counting:
        result.counts[what] += 1
        if difference:
            result.wrong.append(difference)


_counting = threading.Lock()
