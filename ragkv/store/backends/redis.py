"""Redis and Valkey: a string for each value, and a sorted set of the keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from ragkv.errors import MissingDependencyError, StoreError, StoreFullError, install_command
from ragkv.store.backends.backend import (
    Backend,
    Blob,
    Bytes,
    Key,
    Outage,
    check_key,
    is_key,
    length_of,
)

LARGEST_VALUE = (512 << 20) - 1024
"""Bytes. Redis limits strings, and requests by ``proto-max-bulk-len``, to 512 MB."""

CONNECT_TIMEOUT_S = 3.0
TIMEOUT_S = 5.0
"""Seconds for one response. ``?socket_timeout=`` in the URL changes it."""

_ENCODING = "latin-1"
"""Encoding of keys: valid ones are ASCII, a damaged one can have any byte."""
_BATCH_KEYS = 256
_PAGE = 1000


class RedisBackend(Backend):
    """Keeps values in a Redis or Valkey server.

    Parameters
    ----------
    url
        ``redis://host:port/db``, ``valkey://…``, with TLS ``rediss://…``, ``valkeys://…``,
        with redis-py's options behind ``?``.
    name
        Folder name of the namespace: the keys begin with ``ragkv:{name}:``.

    Raises as :func:`ragkv.store.open_store`.

    Notes
    -----
    The server should not evict keys (``maxmemory-policy noeviction``): an evicted value is a miss,
    which has to be precomputed again. The server's ``appendfsync`` decides on durability.
    """

    remote = True

    def __init__(self, url: str, name: str) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise MissingDependencyError(
                f"a store in Redis needs redis-py: {install_command('redis')}"
            ) from error
        self._redis = redis
        self._place = _without_password(url)
        base = f"ragkv:{{{name}}}:"  # braces keep a namespace on one node of a cluster
        self._values, self._keys = f"{base}value:", f"{base}keys"
        self._outage = Outage()
        self._closed = False
        try:
            self._client: Any = redis.Redis.from_url(
                re.sub("^valkey", "redis", url),
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                socket_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 1),  # an idle connection can have gone stale
            )
        except ValueError as error:
            raise StoreError(f"{self._place} is no address of a Redis server: {error}") from error
        with self._errors():
            self._client.ping()

    def get(self, key: str) -> Blob | None:
        """Return the value."""
        with self._errors():
            found: bytes | None = self._client.get(self._name(key))
            return found

    def get_many(self, keys: Iterable[str]) -> Iterator[Blob | None]:
        """Read many values in one request."""
        rest = iter(keys)
        while names := [self._name(key) for key in islice(rest, _BATCH_KEYS)]:
            with self._errors():
                found = self._client.mget(names)
            yield from found

    def size(self, key: str) -> int | None:
        """Return the value's length."""
        with self._errors():
            pipe = self._client.pipeline()
            pipe.exists(self._name(key))
            pipe.strlen(self._name(key))
            exists, nbytes = pipe.execute()
            return int(nbytes) if exists else None

    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        """Write value and key in one transaction."""
        value = self._joined(key, parts)
        with self._errors():
            pipe = self._client.pipeline()
            pipe.set(self._name(key), value)
            pipe.zadd(self._keys, {key: 0})
            pipe.execute()

    def check_room(self, key: str, nbytes: int) -> None:
        """Compare with the longest string that a server takes."""
        if nbytes > LARGEST_VALUE:
            raise StoreFullError(
                f"{key} has {nbytes} bytes, and Redis takes {LARGEST_VALUE} in one value: use "
                "smaller chunks or an int8 or int4 codec, or another store"
            )

    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        """Write a value unless there is one; the server makes this atomic."""
        value = self._joined(key, parts)
        with self._errors():
            # the key first: it is harmless without a value, a value without it is not listed
            self._client.zadd(self._keys, {key: 0})
            return bool(self._client.set(self._name(key), value, nx=True))

    def delete(self, key: str) -> bool:
        """Remove value and key in one transaction."""
        with self._errors():
            pipe = self._client.pipeline()
            pipe.unlink(self._name(key))
            pipe.zrem(self._keys, key.encode(_ENCODING, "replace"))
            return bool(pipe.execute()[0])

    def listed(self, prefix: str, after: str = "") -> Iterator[Key]:
        """Yield keys by pages of the sorted set, one character for each byte."""
        low: str | bytes = f"({after}" if after >= prefix else f"[{prefix}"
        low, high = low if after or prefix else "-", f"({prefix}\x7f" if prefix else "+"
        page = [b""] * _PAGE
        while len(page) == _PAGE:
            with self._errors():
                page = self._client.zrangebylex(self._keys, low, high, 0, _PAGE)
                names = [name.decode(_ENCODING) for name in page]
                pipe = self._client.pipeline(transaction=False)
                for name in names:
                    pipe.exists(self._name(name))
                    pipe.strlen(self._name(name))
                found = pipe.execute()
            for name, exists, nbytes in zip(names, found[::2], found[1::2], strict=True):
                if exists or not is_key(name):
                    yield Key(name, nbytes)
            low = b"(" + page[-1] if page else low

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        self._client.close()

    def _joined(self, key: str, parts: Sequence[Bytes]) -> bytes:
        self.check_room(check_key(key), length_of(parts))
        return b"".join(parts)

    def _name(self, key: str) -> bytes:
        return f"{self._values}{key}".encode(_ENCODING, "replace")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        if self._closed:
            raise StoreError(f"the store at {self._place} is closed")
        with self._outage.noted():
            try:
                yield
            except self._redis.OutOfMemoryError as error:
                raise StoreFullError(
                    f"no room left at {self._place}: raise maxmemory, or forget chunks"
                ) from error
            except self._redis.RedisError as error:
                raise StoreError(f"the server at {self._place} cannot be used: {error}") from error


def _without_password(url: str) -> str:
    """Remove user and password; a password can contain any character, or be an option."""
    scheme, _, rest = url.partition("//")
    rest = re.split("[?&](?:username|password)=", rest)[0].rpartition("@")[2]
    return f"{scheme}//{rest.partition('?')[0]}"
