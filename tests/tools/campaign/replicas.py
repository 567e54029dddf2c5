"""Faults of a store that two replicas share: one is cut off, all is slow, the server restarts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import TypeVar
from unittest import mock

from link import Link
from store_servers import RedisServer, S3Server, installed

from campaign.case import ALL, Case
from campaign.world import TEXTS, engine, precompute
from ragkv import RagKV
from ragkv.config import StoreConfig
from ragkv.errors import StoreError
from ragkv.store.backends import backend, redis, s3

Server = RedisServer | S3Server
T = TypeVar("T")
_PATIENCE_S = 0.5


def cut_off(case: Case) -> None:
    """Cut one replica off, or let its packets be lost, while both work; then let it back."""
    _share(case, lambda _, link: case.draw.choice((link.cut, link.hold))())


def slow(case: Case) -> None:
    """Let each answer of the store take longer to one replica, for some longer than it waits."""

    def delay(_: Server, link: Link) -> None:
        link.delay = case.draw.choice((0.02, 0.1, 3 * _PATIENCE_S))

    _share(case, delay)


def restarted(case: Case) -> None:
    """Restart the server in the middle."""

    def restart(server: Server, _: Link) -> None:
        server.kill()
        threading.Timer(case.draw.uniform(0, 0.5), server.start).start()

    _share(case, restart)


def _share(case: Case, harm: Callable[[Server, Link], None]) -> None:
    """Let two replicas precompute, forget and answer, with the harm in the middle."""
    with ExitStack() as stack:
        if (server := _server(case)) is None:
            return
        stack.enter_context(server)
        link = stack.enter_context(Link(server.url))
        memory = {"memory_bytes": case.config.memory_bytes}
        case.config = StoreConfig(server.url, **memory)
        near = stack.enter_context(engine(case.config))
        for chunk in case.acknowledged:
            precompute(near, chunk)
        with _short_patience():
            open_far = partial(engine, StoreConfig(link.url, **memory))
            far = stack.enter_context(_until_in_time(open_far))
        stack.enter_context(mock.patch.object(backend, "LONG_WAIT_S", _PATIENCE_S / 2))
        case.ask(far)
        rest = case.draw.sample(sorted(set(ALL) - case.acknowledged), len(ALL) - 4)
        for number, chunk in enumerate(rest):
            if number == 1:
                case.outcome.struck += 1
                harm(server, link)
            _step(case, far if number % 2 else near, chunk)
            if number == 2:
                gone = case.draw.choice(sorted(case.acknowledged))
                with suppress(StoreError):
                    case.acknowledged.discard(gone)
                    near.forget(TEXTS[gone])
            case.ask(case.draw.choice((near, far)))
        link.delay = 0.0
        link.heal()
        for replica in (near, far):
            _until_in_time(partial(_refresh, replica))
            case.ask(replica, 2)
            _until_in_time(partial(case.check_acknowledged, replica))
        if set(near._reuse.corpus._finder._live) != set(far._reuse.corpus._finder._live):
            case.outcome.wrong.append("the replicas know different chunks")
        case.examine()  # while the server is there


def _step(case: Case, replica: RagKV, chunk: int) -> None:
    with suppress(StoreError):
        precompute(replica, chunk)
        if replica.contains(TEXTS[chunk]):  # what is computed in the background may fail unseen
            case.acknowledged.add(chunk)


def _refresh(replica: RagKV) -> None:
    if not replica._reuse.corpus.refresh():
        raise StoreError("the store does not come back")


def _until_in_time(call: Callable[[], T]) -> T:
    """Repeat a call while the store is whole, before the harm and after it.

    A StoreError is a timeout there: the machine is busy, and the far replica's patience is short.
    The last of a hundred is raised.
    """
    for _ in range(99):
        with suppress(StoreError):
            return call()
        time.sleep(0.1)
    return call()


def _server(case: Case) -> Server | None:
    """Return a server that runs; None where there is none on this machine."""
    has_redis = bool(installed()) and find_spec("redis") is not None
    has_s3 = all(map(find_spec, ("obstore", "boto3", "moto")))
    kinds = ["redis"] * has_redis + ["s3"] * has_s3
    kind = case.draw.choice(kinds or [""])
    if kind == "redis":
        return RedisServer(case.folder, durable=True)
    return S3Server() if kind else None


@contextmanager
def _short_patience() -> Iterator[None]:
    """Let stores that are opened in the block wait for a moment alone."""
    with (
        mock.patch.object(redis, "TIMEOUT_S", _PATIENCE_S),
        mock.patch.object(s3, "TIMEOUT", timedelta(seconds=2 * _PATIENCE_S)),
    ):
        yield
