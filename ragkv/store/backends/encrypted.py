"""Encryption at rest over any backend: AES-256-GCM by segment, a key for each namespace.

Who reads or changes the place without the key learns the number of values, their sizes
and when they come and go, and can remove or restore whole values, but not read one,
make one, move one to another name, or test whether a text is stored.

Keys. See :mod:`ragkv.store.backends.keys`. As each value has a fresh one, parts of two
values, or of two versions of one value, never go together.

Values. Segments of at most 1 MiB of plain text, each ``salt (16) | AES-256-GCM``. The
nonce is the segment's number and whether it is the last one (the STREAM construction
of Hoang, Reyhanitabar, Rogaway and Vizar, CRYPTO 2015), so that leaving out, cutting
and reordering segments is found, and any range is read by decrypting its segments alone.

Names. The store's names hold digests of texts; whoever has a text could compute them.
Each part of a name that is a digest is therefore encrypted by AES-SIV (RFC 5297), which
gives equal names for equal digests, and which the holder of the key can turn back when
scanning. All other parts, such as ``log/00000000000000000001``, stay and keep their order.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ragkv.errors import StoreError
from ragkv.store.backends.base import Backend, Blob, Bytes, Key
from ragkv.store.backends.keys import KEY_VARIABLE, Keys, has_digest

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 20
"""Plain bytes of every segment but the last, which has at most as many."""

_SALT = 16
_OVERHEAD = _SALT + 16  # and the tag
_SEALED = SEGMENT_BYTES + _OVERHEAD
_TRIED_AT_OPENING = 8


class EncryptedBackend(Backend):
    """Keeps values encrypted in another backend.

    Of a value that was cut, changed, moved, or written without this key nothing is left: it
    reads as empty, and the log says so once.

    Parameters
    ----------
    inner
        Where the encrypted values go. Closed together with this one, and where this fails.
    namespace
        Whose key it is; any text.
    master
        32 secret bytes, see :func:`ragkv.store.backends.keys.key_from_environment`.

    Raises
    ------
    ConfigError
        The master key is not 32 bytes.
    MissingDependencyError
        The package cryptography is not installed.
    StoreError
        The place holds values, and this key opens none of those that were tried.
    """

    def __init__(self, inner: Backend, namespace: str, master: bytes) -> None:
        self._inner = inner
        self.remote = inner.remote
        self._reported: set[str] = set()
        try:
            self._keys = Keys(master, namespace)
            self._check_key()
        except BaseException:
            inner.close()
            raise

    def get(self, key: str) -> Blob | None:
        """Return the whole value; empty where it is not what was written."""
        return self._whole(key, self._inner.get(self._keys.hide(key)))

    def get_many(self, keys: Iterable[str]) -> Iterator[Blob | None]:
        """Decrypt each value when its turn comes."""
        names = list(keys)
        return map(self._whole, names, self._inner.get_many(map(self._keys.hide, names)))

    def size(self, key: str) -> int | None:
        """Return the value's plain bytes, None where nothing encrypted has this size."""
        sealed = self._inner.size(self._keys.hide(key))
        return None if sealed is None or not _is_size(sealed) else _plain_size(sealed)

    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        """Encrypt and write a value."""
        self._inner.put(self._keys.hide(key), self._seal(key, parts))
        self._reported.discard(key)

    def check_room(self, key: str, nbytes: int) -> None:
        """Ask below, of what it will be at least."""
        self._inner.check_room(self._keys.hide(key), nbytes)

    def free_bytes(self) -> tuple[int, str] | None:
        """Ask below."""
        return self._inner.free_bytes()

    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        """Write a value unless there is one, void or not."""
        return self._inner.put_if_absent(self._keys.hide(key), self._seal(key, parts))

    def delete(self, key: str) -> bool:
        """Remove a value, whether or not it opens."""
        return self._inner.delete(self._keys.hide(key))

    def scan(self, prefix: str, after: str = "") -> Iterator[Key]:
        """Yield plain names and sizes; names that were made without this key are left out.

        Hidden names have no order, so that a folder's names are all read before the
        first is returned. The backend is asked only for those behind ``after`` where
        that is no digest: hidden names begin with ``x``, digests with a digit or a to f,
        so that a digest behind a plain name is never hidden before it.
        """
        folder = prefix[: prefix.rfind("/") + 1]
        plain = not has_digest(after)
        found = []
        for key in self._inner.scan(self._keys.hide(folder), after if plain else ""):
            name = self._keys.show(key.name)
            if name is not None and name.startswith(prefix) and name > after:
                found.append(Key(name, _plain_size(key.nbytes)))
        return iter(sorted(found))

    def close(self) -> None:
        """Close the backend below."""
        self._inner.close()

    def _seal(self, key: str, parts: Sequence[Bytes]) -> list[Bytes]:
        salt = secrets.token_bytes(_SALT)
        seal = self._keys.value(key, salt).encrypt
        segments = list(_segments(parts))
        sealed: list[Bytes] = []
        for number, segment in enumerate(segments):
            nonce = _nonce(number, last=number == len(segments) - 1)
            sealed += [salt, seal(nonce, segment, salt)]
        return sealed

    def _open(self, key: str, sealed: memoryview, *, last: bool = True) -> bytearray | None:
        """Decrypt a value's segments, the ``last`` among them; None where one is damaged."""
        from cryptography.exceptions import InvalidTag

        count = -(-len(sealed) // _SEALED)
        plain = bytearray(max(0, len(sealed) - count * _OVERHEAD))
        try:
            salt = bytes(sealed[:_SALT])
            unseal = self._keys.value(key, salt).decrypt
            for index in range(max(count, 1)):
                segment = sealed[index * _SEALED : (index + 1) * _SEALED]
                nonce = _nonce(index, last=last and index == count - 1)
                at = index * SEGMENT_BYTES
                opened = unseal(nonce, segment[_SALT:], bytes(segment[:_SALT]))
                plain[at : at + len(opened)] = opened
        except InvalidTag:
            if key not in self._reported:
                self._reported.add(key)
                logger.warning(
                    "the stored value %s was changed or has another key: it is void", key
                )
            return None
        return plain

    def _check_key(self) -> None:
        tried = [key.name for key in islice(self._inner.scan(""), _TRIED_AT_OPENING)]
        if tried and not any(map(self._opens, tried)):
            raise StoreError(
                f"none of the store's values opens with the key in {KEY_VARIABLE}: use the key "
                "that wrote it, open it without encryption if it never had one, or take another "
                "place"
            )

    def _whole(self, key: str, sealed: Blob | None) -> Blob | None:
        if sealed is None:
            return None
        plain = self._open(key, memoryview(sealed))
        return b"" if plain is None else plain

    def _opens(self, hidden: str) -> bool:
        """Whether a value's first segment is of this key."""
        name = self._keys.show(hidden)
        sealed = None if name is None else self._inner.get(hidden)
        if name is None or sealed is None:
            return False
        self._reported.add(name)  # only the key is tried
        last = len(sealed) <= _SEALED
        opened = self._open(name, memoryview(sealed)[:_SEALED], last=last) is not None
        self._reported.discard(name)
        return opened


def _nonce(number: int, *, last: bool) -> bytes:
    return number.to_bytes(8, "big") + int(last).to_bytes(4, "big")


def _plain_size(sealed: int) -> int:
    return max(0, sealed - -(-sealed // _SEALED) * _OVERHEAD)


def _is_size(sealed: int) -> bool:
    """Whether a value can take so many bytes: no segment is shorter than salt and tag."""
    return sealed > 0 and (sealed - 1) % _SEALED >= _OVERHEAD - 1


def _segments(parts: Sequence[Bytes]) -> Iterator[bytes]:
    """Cut the parts, one behind the other, into segments; an empty value has an empty one."""
    held = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        while len(held) + len(view) > SEGMENT_BYTES:
            room = SEGMENT_BYTES - len(held)
            yield bytes(held) + bytes(view[:room])
            view, held = view[room:], bytearray()
        held += view
    yield bytes(held)
