"""The faults: each does its harm to a case's store and says what is still acknowledged."""

import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from children import Child, Say
from scarce_memory import ScarceMemory, allocations
from store_servers import RedisServer, installed

from campaign.case import ALL, Case, acknowledged
from campaign.replicas import cut_off, restarted, slow
from campaign.world import (
    TEXTS,
    ask,
    draw_questions,
    engine,
    precompute,
    sink_of,
    wrong,
)
from ragkv.config import StoreConfig
from ragkv.errors import OutOfMemoryError, StoreError
from ragkv.store import open_chunk_store
from ragkv.store.types import Terms

DAY_S = 86_400.0


def kill_precompute(case: Case) -> None:
    """SIGKILL a process that precomputes chunks and forgets some."""
    order = case.draw.sample(ALL, len(ALL))
    child = Child(_precompute_and_forget, case.config, order * 2)
    case.outcome.struck += child.kill(case.draw, 2 * len(ALL))
    case.acknowledged = acknowledged(child, case.acknowledged)


def kill_eviction(case: Case) -> None:
    """SIGKILL a process whose store is full, so that every put deletes chunks."""
    # a chunk comes with its neighbour and its version: there is room for those of two chunks,
    # but not for all
    case.config = replace(case.config, disk_bytes=_room(case, 9.1, 11))
    order = [case.draw.choice(ALL) for _ in range(20)]
    child = Child(_precompute, case.config, order)
    case.outcome.struck += child.kill(case.draw, len(order))
    # what was acknowledged before the last one may have left for it, or for the next; and so may
    # one that was stored before: precomputing it again is no use of it
    case.acknowledged = {int(line[1:]) for line in child.said[-1:] if line[0] == "+"}
    case.check_budget()


def flip(case: Case) -> None:
    """Flip one random bit of a random file."""
    path = _any_file(case)

    def damage() -> None:
        data = bytearray(path.read_bytes())
        if data:
            data[case.draw.randrange(len(data))] ^= 1 << case.draw.randrange(8)
            path.write_bytes(data)

    _damage_between_answers(case, damage)


def cut(case: Case) -> None:
    """Cut a random file to a random length."""
    path = _any_file(case)
    length = case.draw.randrange(max(1, path.stat().st_size))
    _damage_between_answers(case, lambda: os.truncate(path, length))


def full_quota(case: Case) -> None:
    """Let a quota be used up while chunks are put: each is evicted for the next."""
    config, case.config = case.config, replace(case.config, disk_bytes=_room(case))
    child = _fill(case)
    case.acknowledged = {int(line[1:]) for line in child.said[-1:]}
    case.outcome.struck += len(child.said) == len(ALL)
    case.check_budget()
    case.config = config


def full_limit(case: Case) -> None:
    """Let every file end at a limit, as it does where the disk is full."""
    _fill(case, case.draw.randrange(1000, 80_000))


def full_tmpfs(case: Case) -> None:
    """Let a small file system be full; where none can be mounted, a limit does."""
    mounted = case.folder / "small"
    mounted.mkdir()
    size = case.draw.randrange(200, 600)
    with _tmpfs(mounted, size) as usable:
        if not usable:
            full_limit(case)
            return
        config, case.config = case.config, replace(case.config, path=mounted / "store")
        case.acknowledged = set()
        _fill(case)
        shutil.copytree(mounted / "store", case.folder / "copied")
        with suppress(StoreError), engine(case.config) as kv:
            case.ask(kv, 3)
    case.config = replace(config, path=case.folder / "copied")


def gone(case: Case) -> None:
    """Kill the Redis server while answers are asked for, then start it again.

    Where there is none, the store's folder is moved away and back.
    """
    if not installed() or find_spec("redis") is None:
        _folder_gone(case)
        return
    with RedisServer(case.folder, durable=True) as server:
        case.config = StoreConfig(server.url, memory_bytes=case.config.memory_bytes)
        with engine(case.config) as kv:
            for chunk in case.acknowledged:
                precompute(kv, chunk)
            killer = threading.Timer(case.draw.uniform(0, 0.3), server.kill)
            killer.start()
            for chunk in set(ALL) - case.acknowledged:
                case.ask(kv)
                with suppress(StoreError):
                    precompute(kv, chunk)
                    case.acknowledged.add(chunk)
            case.outcome.struck += not killer.is_alive()
            killer.join()
            case.ask(kv, 2)
            server.start()
            case.ask(kv, 2)
        case.examine()  # while the server is there


def two_writers(case: Case) -> None:
    """Let two processes precompute the same chunks at once."""
    orders = [case.draw.sample(ALL, len(ALL)) for _ in range(2)]
    if case.draw.random() < 0.5:
        orders[1] = orders[0]
    children = [Child(_precompute, case.config, order) for order in orders]
    case.outcome.struck += 1
    for child in children:
        if child.end() != 0:
            case.outcome.wrong.append("a writer failed beside another")
        case.acknowledged = acknowledged(child, case.acknowledged)


def clock_back(case: Case) -> None:
    """Set the clock back, forth and back again, under a store with a chunk that expires."""
    now = time.time()
    ahead = now + case.draw.uniform(0, 30) * DAY_S
    brief = case.draw.choice(ALL)
    with engine(":memory:") as kv:
        precompute(kv, brief)
        fingerprint = sink_of(kv).fingerprint
        entry = kv._store.get(TEXTS[brief], fingerprint).entry
    with _clock(ahead), engine(case.config) as kv:
        kv.forget(TEXTS[brief])
        kv._store.put(entry, fingerprint, Terms(expires_at=ahead + 3600))
        for chunk in ALL:
            precompute(kv, chunk)
        case.acknowledged = set(ALL)
    case.outcome.struck += 1
    for moment in (now - case.draw.uniform(0, 30) * DAY_S, ahead + 7200, now):
        if moment > ahead:
            case.acknowledged.discard(brief)
        with _clock(moment):
            with closing(open_chunk_store(case.config)) as store:
                store.gc()
            with engine(case.config) as kv:
                case.ask(kv)
                case.check_acknowledged(kv)


def out_of_memory(case: Case) -> None:
    """Let memory run out at an allocation of an answer, once or from then on."""
    with engine(case.config) as kv:
        for question in draw_questions(case.draw, 3):
            count = allocations(partial(ask, kv, question))
            scarce = ScarceMemory(case.draw.randint(1, count), lasts=case.draw.random() < 0.5)
            case.outcome.answers += 2
            try:
                with scarce.in_this_thread():
                    answer = ask(kv, question)
            except OutOfMemoryError:
                case.outcome.struck = 1
            else:
                case.outcome.wrong += filter(None, [wrong(question, answer)])
            case.ask(kv)
            case.check_acknowledged(kv)


FAULTS: dict[str, Callable[[Case], None]] = {
    "killed in precompute": kill_precompute,
    "killed in eviction": kill_eviction,
    "bit flipped": flip,
    "file cut": cut,
    "quota full": full_quota,
    "files limited": full_limit,
    "small tmpfs full": full_tmpfs,
    "backend gone": gone,
    "two writers": two_writers,
    "clock set back": clock_back,
    "memory runs out": out_of_memory,
    "replica cut off": cut_off,
    "store slow": slow,
    "store restarted": restarted,
}


def _damage_between_answers(case: Case, damage: Callable[[], None]) -> None:
    """Damage a file under an engine that has, or has not, some chunks in memory."""
    case.damages = True
    with engine(case.config) as kv:
        if case.draw.random() < 0.5:
            case.ask(kv)
        damage()
        case.outcome.struck += 1
        case.ask(kv)


def _any_file(case: Case) -> Path:
    files = [path for path in Path(case.config.path or "").rglob("*") if path.is_file()]
    return case.draw.choice(sorted(files))


def _room(case: Case, least: float = 4.1, most: float = 6) -> int:
    """Return the bytes of so many entries."""
    with closing(open_chunk_store(case.config)) as store:
        largest = max(info.nbytes for info in store.entries())
    return int(case.draw.uniform(least, most) * largest)


def _precompute_and_forget(say: Say, config: StoreConfig, order: list[int]) -> None:
    """Precompute chunks, those anew that are there."""
    with engine(config) as kv:
        for chunk in order:
            if kv.contains(TEXTS[chunk]):
                say(f"-{chunk}")
                kv.forget(TEXTS[chunk])
            precompute(kv, chunk)
            say(f"+{chunk}")


def _precompute(say: Say, config: StoreConfig, order: list[int]) -> None:
    """Precompute chunks, and say which are new."""
    with engine(config) as kv:
        for chunk in order:
            new = not kv.contains(TEXTS[chunk])
            precompute(kv, chunk)
            say(f"{'+' if new else '='}{chunk}")


def _precompute_what_fits(say: Say, config: StoreConfig, file_bytes: int | None) -> None:
    """Precompute all; nothing but a StoreError may come of what does not fit."""
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    try:
        with engine(config) as kv:
            for chunk in ALL:
                try:
                    precompute(kv, chunk)
                    say(f"+{chunk}")
                except StoreError:
                    say("full")
    except StoreError:  # not even the index can be opened
        say("full")


def _fill(case: Case, file_bytes: int | None = None) -> Child:
    """Precompute all in a child; files may have a largest size."""
    child = Child(_precompute_what_fits, case.config, file_bytes)
    if child.end() != 0:
        case.outcome.wrong.append("a full store raises something else than a StoreError")
    case.outcome.struck += "full" in child.said
    case.acknowledged = acknowledged(child, case.acknowledged)
    return child


def _folder_gone(case: Case) -> None:
    folder = Path(case.config.path or "")
    with engine(case.config) as kv:
        case.ask(kv)
        folder.rename(folder.with_name("away"))
        case.outcome.struck += 1
        try:
            case.ask(kv, 2)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_name("away").rename(folder)


@contextmanager
def _clock(now: float) -> Iterator[None]:
    with mock.patch("time.time", return_value=now):
        yield


@contextmanager
def _tmpfs(folder: Path, kilobytes: int) -> Iterator[bool]:
    """Mount a small file system; yield whether that was permitted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], capture_output=True, check=True)
