"""S3 and compatible servers: one object for each value, through obstore."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ragkv.errors import ConfigError, MissingDependencyError, StoreError, install_command
from ragkv.model.pool import Pool
from ragkv.store.backends.backend import Backend, Bytes, Key, Outage, check_key

TIMEOUT = timedelta(seconds=30)
THREADS = 16
"""Concurrent requests for many small values."""

_BACKOFF = {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1)}
_RETRIES: Any = {"max_retries": 2, "backoff": _BACKOFF | {"base": 2}}
_CLIENT: Any = {"allow_http": True, "connect_timeout": timedelta(seconds=3)}
_OPTIONS = ("endpoint", "region")


class S3Backend(Backend):
    """Keeps values as objects of a bucket.

    Parameters
    ----------
    store
        An obstore store whose keys all belong to this backend, see :func:`open_s3`.
    place
        The store's name in errors.

    Notes
    -----
    S3 promises that writes are atomic and immediately visible to every reader. The server must
    support conditional writes (``If-None-Match``).
    """

    remote = True

    def __init__(self, store: Any, place: str) -> None:
        import obstore

        self._obstore = obstore
        self._errors_of = obstore.exceptions
        self._store = store
        self._place = place
        self._pool = Pool(THREADS, "ragkv-s3")
        self._outage = Outage()
        self._closed = False

    def get(self, key: str) -> bytearray | None:
        """Read an object into writable memory."""
        with self._errors():
            try:
                return bytearray(self._obstore.get(self._store, key).bytes())
            except FileNotFoundError:
                return None

    def get_many(self, keys: Iterable[str]) -> Iterator[bytearray | None]:
        """Read several objects at once."""
        with self._errors():
            return self._pool.map(self.get, keys)

    def size(self, key: str) -> int | None:
        """Return the object's length."""
        with self._errors():
            try:
                return int(self._obstore.head(self._store, key)["size"])
            except FileNotFoundError:
                return None

    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        """Write an object atomically; a large one takes several requests."""
        with self._errors():
            self._obstore.put(self._store, check_key(key), b"".join(parts))

    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        """Write an object if there is none."""
        with self._errors():
            try:
                self._obstore.put(self._store, check_key(key), b"".join(parts), mode="create")
            except (self._errors_of.AlreadyExistsError, self._errors_of.PreconditionError):
                return False
            return True

    def delete(self, key: str) -> bool:
        """Remove an object; several concurrent callers can get True."""
        if self.size(key) is None:
            return False
        with self._errors():
            try:
                self._obstore.delete(self._store, key)
            except FileNotFoundError:
                return False
            return True

    def listed(self, prefix: str, after: str = "") -> Iterator[Key]:
        """List a folder after ``after``; S3 lists in the order of keys."""
        folder = prefix.rpartition("/")[0] or None  # obstore's prefixes are whole names
        with self._errors():
            pages = self._obstore.list(self._store, folder, offset=after or None, chunk_size=1000)
            for page in pages:
                for found in page:
                    if found["path"] and found["path"].startswith(prefix):  # "" marks a folder
                        yield Key(found["path"], found["size"])

    def close(self) -> None:
        """End the threads; obstore has nothing to close."""
        self._closed = True
        self._pool.shutdown()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        if self._closed:
            raise StoreError(f"the store at {self._place} is closed")
        with self._outage.noted():
            try:
                yield
            except StoreError:  # an OSError, from the iterator of keys
                raise
            except (self._errors_of.BaseError, OSError) as error:
                reason = str(error).partition("\n")[0]
                raise StoreError(f"{self._place} cannot be used: {reason}") from error


def open_s3(url: str, name: str) -> S3Backend:
    """Open a namespace's part of a bucket.

    Parameters
    ----------
    url
        ``s3://bucket/prefix``. Keys, region and endpoint come from the environment
        (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``,
        ``AWS_ENDPOINT_URL``), the last two also from the URL: ``?endpoint=…&region=…``.
    name
        Folder of the namespace below the prefix.

    Raises as :func:`ragkv.store.open_store`.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise MissingDependencyError(
            f"a store in S3 needs obstore: {install_command('s3')}"
        ) from error
    parts = urlsplit(url)
    options: Any = dict(parse_qsl(parts.query))
    if not parts.netloc or not set(options) <= set(_OPTIONS):
        raise ConfigError(f"{url} is no s3://bucket/prefix; options are {' and '.join(_OPTIONS)}")
    prefix = "/".join(filter(None, parts.path.split("/")))
    try:
        store = S3Store(
            parts.netloc,
            prefix=f"{prefix}/{name}" if prefix else name,
            config=options,
            client_options=_CLIENT | {"timeout": TIMEOUT},
            retry_config=_RETRIES | {"retry_timeout": TIMEOUT},
        )
    except BaseError as error:
        raise StoreError(f"{url} cannot be opened: {error}") from error
    backend = S3Backend(store, url)
    next(backend.scan(""), None)  # fails unless the bucket exists and can be listed
    return backend
