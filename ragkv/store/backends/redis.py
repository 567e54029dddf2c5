"""Redis and Valkey: values in parts, behind a pointer that is switched at once.

Small values lie in their pointer, others in parts of a name that is used once. The parts
are written first, with a time to live, so that those of a crashed writer go by
themselves; one transaction then makes them stay, and switches the pointer and the
ordered set of keys. A reader that finds parts gone reads the pointer again.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple

from ragkv.errors import MissingDependencyError, StoreError, StoreFullError
from ragkv.store.backends.base import Backend, Blob, Bytes, Key, check_key, length_of

PART_BYTES = 64 << 20
"""Bytes of a part. Redis takes 512 MB."""

INLINE_BYTES = 1 << 16
"""Values up to this length lie in their pointer."""

CONNECT_TIMEOUT_S = 3.0
TIMEOUT_S = 30.0
"""How long one answer may take. ``?socket_timeout=`` in the URL changes it."""

_UNFINISHED_S = 3600
_POINTERS_AT_ONCE = 256
_PAGE = 1000
_POINTER = re.compile(rb">([0-9a-f]{32}) ([0-9]{1,15}) ([0-9]{1,9})")
_POINTER_BYTES = 64


class RedisBackend(Backend):
    """Keeps values in a Redis or Valkey server.

    Parameters
    ----------
    url
        ``redis://host:port/db``, ``valkey://…``, with TLS ``rediss://…``, ``valkeys://…``,
        with redis-py's options behind ``?``.
    name
        Whose values these are: the keys begin with ``ragkv:{name}:``.
    part_bytes
        Longest part.

    Raises
    ------
    MissingDependencyError
        The package redis is not installed.
    StoreError
        The server does not answer, or refuses.

    Notes
    -----
    The server must not evict keys (``maxmemory-policy noeviction``): what is evicted is a
    miss, and precomputed again. How durable values are is the server's matter, see its
    ``appendfsync``.
    """

    far = True

    def __init__(self, url: str, name: str, *, part_bytes: int = PART_BYTES) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise MissingDependencyError(
                "a store in Redis needs redis-py: pip install 'ragkv[redis]'"
            ) from error
        self._redis = redis
        self._place = _without_password(url)
        self._base = f"ragkv:{{{name}}}:"  # braces keep a namespace on one node of a cluster
        self._part_bytes = part_bytes
        self._closed = False
        try:
            self._client: Any = redis.Redis.from_url(
                re.sub("^valkey", "redis", url),
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                socket_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 1),  # a connection that went stale while it was idle
            )
        except ValueError as error:
            raise StoreError(f"{self._place} is no address of a Redis server: {error}") from error
        with self._errors():
            self._client.ping()

    def get(self, key: str) -> Blob | None:
        """Return the value: bytes, or a bytearray of several parts."""
        with self._errors():
            return self._value(key, self._client.get(self._pointer(key)))

    def get_many(self, keys: Iterable[str]) -> Iterator[Blob | None]:
        """Read many pointers in one request."""
        left = iter(keys)
        while names := list(islice(left, _POINTERS_AT_ONCE)):
            with self._errors():
                found = self._client.mget([self._pointer(key) for key in names])
            for key, data in zip(names, found, strict=True):
                with self._errors():
                    value = self._value(key, data)
                yield value

    def read(self, key: str, start: int, length: int) -> bytes | None:
        """Read the range's parts alone, and of those no more than the range."""
        with self._errors():
            data = self._client.get(self._pointer(key))
            while (pointer := _parse(data)) is not None:
                if pointer.value is not None:
                    return pointer.value[start : start + length]
                end = max(start, min(start + length, pointer.nbytes))
                size = pointer.part_bytes
                pipe = self._client.pipeline(transaction=False)
                for part in range(start // size, -(-end // size)):
                    first = max(start - part * size, 0)
                    last = min(end - part * size, size) - 1
                    pipe.getrange(self._part(pointer, part), first, last)
                found = b"".join(pipe.execute())
                before, data = data, self._client.get(self._pointer(key))
                if len(found) == end - start or data == before:
                    return found
            return None

    def size(self, key: str) -> int | None:
        """Return the length that the pointer gives, if the parts are there."""
        with self._errors():
            data = self._client.get(self._pointer(key))
            while (pointer := _parse(data)) is not None:
                parts = self._parts(pointer)
                if not parts or self._client.exists(*parts) == len(parts):
                    return pointer.nbytes
                before, data = data, self._client.get(self._pointer(key))
                if data == before:  # nobody replaced it: the server has lost parts
                    return None
            return None

    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        """Write the parts, then switch the pointer."""
        self._put(key, parts, absent=False)

    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        """Write a value unless there is one."""
        return self.size(key) is None and self._put(key, parts, absent=True)

    def delete(self, key: str) -> bool:
        """Remove the pointer, then the parts."""
        with self._errors(), self._client.pipeline() as pipe:
            pipe.get(self._pointer(key))
            pipe.delete(self._pointer(key))
            pipe.zrem(f"{self._base}keys", key)
            old = _parse(pipe.execute()[0])
            self._remove(old)
            return old is not None

    def scan(self, prefix: str, after: str = "") -> Iterator[Key]:
        """Yield keys by pages of the ordered set."""
        low = f"({after}" if after >= prefix else f"[{prefix}"
        while True:
            with self._errors():
                page = self._client.zrangebylex(
                    f"{self._base}keys", low if after or prefix else "-", f"({prefix}\x7f", 0, _PAGE
                )
                pipe = self._client.pipeline(transaction=False)
                for name in page:
                    pipe.getrange(self._pointer(name.decode()), 0, _POINTER_BYTES)
                    pipe.strlen(self._pointer(name.decode()))
                found = pipe.execute()
            for name, start, nbytes in zip(page, found[::2], found[1::2], strict=True):
                pointer = _parse(start)
                if pointer is not None:
                    inline = pointer.value is not None
                    yield Key(name.decode(), nbytes - 1 if inline else pointer.nbytes)
            if len(page) < _PAGE:
                return
            after = page[-1].decode()
            low = f"({after}"

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        self._client.close()

    def _put(self, key: str, parts: Sequence[Bytes], *, absent: bool) -> bool:
        pointer = self._pointer(key)
        nbytes = length_of(parts)
        written = _Pointer(nbytes, b"".join(parts)) if nbytes <= INLINE_BYTES else None
        if written is None:
            written = _Pointer(nbytes, None, secrets.token_hex(16), self._part_bytes)
        with self._errors():
            try:
                self._write_parts(written, parts)
                old = self._switch(pointer, key, written, absent=absent)
            except BaseException:
                with suppress(StoreError), self._errors():
                    if _parse(self._client.get(pointer)) != written:
                        self._remove(written)
                raise
            if old is not None and absent:
                self._remove(written)
                return False
            self._remove(old)
        return True

    def _write_parts(self, pointer: _Pointer, parts: Sequence[Bytes]) -> None:
        if pointer.value is None:
            for name, data in zip(
                self._parts(pointer), _cut(parts, pointer.part_bytes), strict=True
            ):
                self._client.set(name, data, ex=_UNFINISHED_S)

    def _switch(self, pointer: str, key: str, new: _Pointer, *, absent: bool) -> _Pointer | None:
        """Make a value the key's, and return the one before it; ``absent``: unless there is one."""
        while True:
            with self._client.pipeline() as pipe:
                try:
                    pipe.watch(pointer)
                    old = _parse(pipe.get(pointer))
                    if absent and old is not None:
                        return old
                    pipe.multi()
                    for name in self._parts(new):
                        pipe.persist(name)
                    pipe.set(pointer, new.to_bytes())
                    pipe.zadd(f"{self._base}keys", {key: 0})
                    if not all(pipe.execute()[: len(self._parts(new))]):
                        raise StoreError(f"{self._place} took longer than an hour for a value")
                except self._redis.WatchError:
                    continue
                return old

    def _value(self, key: str, data: bytes | None) -> Blob | None:
        while (pointer := _parse(data)) is not None:
            if pointer.value is not None:
                return pointer.value
            found = [self._client.get(name) for name in self._parts(pointer)]
            if None not in found:
                return found[0] if len(found) == 1 else bytearray().join(found)
            before, data = data, self._client.get(self._pointer(key))
            if data == before:  # nobody replaced it: the server has lost parts
                return b""
        return None

    def _pointer(self, key: str) -> str:
        return f"{self._base}value:{check_key(key)}"

    def _part(self, pointer: _Pointer, number: int) -> str:
        return f"{self._base}part:{pointer.token}:{number}"

    def _parts(self, pointer: _Pointer) -> list[str]:
        if pointer.value is not None:
            return []
        return [self._part(pointer, n) for n in range(-(-pointer.nbytes // pointer.part_bytes))]

    def _remove(self, pointer: _Pointer | None) -> None:
        if pointer is not None and pointer.value is None:
            self._client.unlink(*self._parts(pointer))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        if self._closed:
            raise StoreError(f"the store at {self._place} is closed")
        try:
            yield
        except self._redis.OutOfMemoryError as error:
            raise StoreFullError(
                f"no room left at {self._place}: raise maxmemory, or forget chunks"
            ) from error
        except self._redis.RedisError as error:
            raise StoreError(f"the server at {self._place} cannot be used: {error}") from error


class _Pointer(NamedTuple):
    """A value: itself, or the token in its parts' names."""

    nbytes: int
    value: bytes | None
    token: str = ""
    part_bytes: int = 0

    def to_bytes(self) -> bytes:
        if self.value is not None:
            return b"=" + self.value
        return f">{self.token} {self.nbytes} {self.part_bytes}".encode()


def _parse(data: bytes | None) -> _Pointer | None:
    if data is not None and data.startswith(b"="):
        return _Pointer(len(data) - 1, data[1:])
    match = _POINTER.fullmatch(data or b"")
    if match is None or int(match[3]) == 0:
        return None
    return _Pointer(int(match[2]), None, match[1].decode(), int(match[3]))


def _cut(parts: Sequence[Bytes], size: int) -> Iterator[bytes]:
    """Yield the bytes of all parts, one behind the other, in pieces of ``size``."""
    held: list[memoryview] = []
    room = size
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view) >= room:
            yield b"".join([*held, view[:room]])
            view, held, room = view[room:], [], size
        held.append(view)
        room -= len(view)
    if room < size:
        yield b"".join(held)


def _without_password(url: str) -> str:
    """Leave out who asks: a password may have any character, or stand among the options."""
    scheme, _, rest = url.partition("//")
    rest = re.split("[?&](?:username|password)=", rest)[0].rpartition("@")[2]
    return f"{scheme}//{rest.partition('?')[0]}"
