"""What many chunks cost a process: the index, start-up, memory, and the scan of a prompt."""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from blake3 import blake3
from rich.table import Table

from ragkv.config import StoreConfig
from ragkv.prompt.find import ChunkFinder
from ragkv.store import open_chunk_store, open_store
from ragkv.store.backends import namespace_folder
from ragkv.store.names import Change, TextRow, digest_of_text, entry_key, log_key, text_key
from ragkv_bench.results import Found, of, table
from ragkv_bench.speed.machine import commit, device_name
from ragkv_bench.speed.timing import Done

_FINGERPRINT = "0" * 32
_INSERT = "INSERT OR REPLACE INTO Cache (key, value) VALUES (?, ?)"
_IN_PROMPT = 8
_CAPTION = (
    "Entries of one byte. start: reading the log and building the finder, once a process; poll and "
    "scan: for each prompt, medians. Seconds on one core, the index in the system's cache."
)


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """Numbers of chunks, the characters of each, and how often a prompt is scanned."""

    chunks: tuple[int, ...]
    characters: int = 100
    prompt_characters: int = 16_000
    rounds: int = 20


def bench_scale(plan: ScalePlan, folder: Path) -> Found:
    """Measure each number of chunks in a process of its own; stores in ``folder`` are kept."""
    rows = []
    for count in plan.chunks:
        place = folder / f"{count}-{plan.characters}"
        if not place.is_dir():
            _fill(place, count, plan.characters)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows.append(pool.submit(_measure, place, count, plan).result())
    machine = {"device": device_name(torch.device("cpu")), "commit": commit()}
    return {**machine, **asdict(plan), "rows": rows}


def tables(found: Found) -> list[Table]:
    """Return the one table."""
    title = f"{found['device']}, chunks of {found['characters']} characters"
    columns = {name: of(name, ",.0f") for name in ("chunks", "index_mb", "memory_mb", "peak_mb")}
    columns |= {name: of(name, ",.2f") for name in ("open_s", "start_s", "poll_ms", "scan_ms")}
    return [table(title, _CAPTION, found["rows"], columns, words=0)]


def text_of(number: int, characters: int) -> str:
    """Return a chunk's text, which no other one begins like."""
    return blake3(str(number).encode()).hexdigest(length=(characters + 1) // 2)[:characters]


def _fill(place: Path, count: int, characters: int) -> None:
    """Write the rows of that many chunks, as puts would, in one transaction."""
    with closing(open_chunk_store(StoreConfig(place))) as store:
        store.catalog.add(text_of(0, characters))  # the tables, and the owner's row
    database = namespace_folder(place, "default") / "index" / "cache.db"
    with closing(sqlite3.connect(database, isolation_level=None)) as rows:
        rows.execute("PRAGMA synchronous = 0")
        rows.execute("PRAGMA cache_size = -2000000")  # kilobytes
        rows.execute("BEGIN")
        rows.executemany(_INSERT, _rows(count, characters))
        rows.execute("COMMIT")


def _rows(count: int, characters: int) -> Iterator[tuple[str, bytes]]:
    for number in range(count):
        text = text_of(number, characters)
        digest, change = digest_of_text(text), number + 1
        yield log_key(change), b"=" + Change(text=text).to_bytes()
        yield text_key(digest), b"=" + TextRow(text, change, None).to_bytes()
        yield entry_key(digest, _FINGERPRINT), b"=0"


def _measure(place: Path, count: int, plan: ScalePlan) -> Found:
    """Do what an engine does with its store at its start, and for each prompt."""
    before = _memory()
    open_s, store = _timed(lambda: open_store(StoreConfig(place)))
    finder = ChunkFinder()

    def refresh(since: int = 0) -> int:
        newest, added, _ = store.changes(since)
        finder.add(added)
        return newest

    with closing(store):
        start_s, newest = _timed(refresh)
        chunks = [text_of(count * at // _IN_PROMPT, plan.characters) for at in range(_IN_PROMPT)]
        filler = " ".join(str(at) for at in range(plan.prompt_characters))
        prompt = "\n\n".join([*chunks, filler])[: plan.prompt_characters]
        polls, scans, found = [], [], 0
        for _ in range(plan.rounds):
            polls.append(_timed(lambda: refresh(newest))[0])
            seconds, spans = _timed(lambda: finder.find(prompt))
            scans.append(seconds)
            found += [span.text for span in spans] == chunks
        if found < plan.rounds:
            raise RuntimeError("the finder missed chunks of the prompt")
        memory, peak = _memory() - before, _memory("VmHWM")
        index = next(place.rglob("cache.db")).stat().st_size
        return {
            "chunks": count,
            "index_mb": index / 1e6,
            "open_s": open_s,
            "start_s": start_s,
            "memory_mb": memory / 1e6,
            "peak_mb": (peak - before) / 1e6,
            "poll_ms": 1000 * statistics.median(polls),
            "scan_ms": 1000 * statistics.median(scans),
        }


def _timed(work: Callable[[], Done]) -> tuple[float, Done]:
    """Return a call's seconds on a core, whatever else the machine does, and its result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def _memory(figure: str = "VmRSS") -> int:
    """Return the bytes that this process holds in memory; VmHWM: the most so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(figure))
