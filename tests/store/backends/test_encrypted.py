"""Encryption at rest: nothing is read, moved, cut or tested for without the key."""

from __future__ import annotations

import base64
import logging
import random
from collections.abc import Iterator, Sequence

import pytest

from ragkv.errors import ConfigError, MissingDependencyError, StoreError
from ragkv.store.backends import encrypted, keys
from ragkv.store.backends.base import Backend, Bytes, Key
from ragkv.store.chunk_store import ChunkStore

pytest.importorskip("cryptography")

KEY = bytes(range(32))
DIGEST = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4


class Plain(Backend):
    """The contract in a dictionary, open to the tests."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.closed = False

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def size(self, key: str) -> int | None:
        return None if key not in self.values else len(self.values[key])

    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        self.values[key] = b"".join(parts)

    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        return self.values.setdefault(key, value := b"".join(parts)) is value

    def delete(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def scan(self, prefix: str, after: str = "") -> Iterator[Key]:
        names = sorted(n for n in self.values if n.startswith(prefix) and n > after)
        return iter([Key(name, len(self.values[name])) for name in names])

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def inner() -> Plain:
    return Plain()


@pytest.fixture
def backend(inner: Plain, monkeypatch: pytest.MonkeyPatch) -> encrypted.EncryptedBackend:
    """Segments of 100 bytes: many in short values."""
    monkeypatch.setattr(encrypted, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(encrypted, "_SEALED", 132)
    return encrypted.EncryptedBackend(inner, "default", KEY)


def draw_bytes(count: int) -> bytes:
    return random.Random(count).randbytes(count)


@pytest.mark.parametrize("length", [0, 1, 99, 100, 101, 200, 250, 1000])
def test_values_come_back(backend, inner, length):
    value = draw_bytes(length)
    backend.put("a/b", [value[:30], memoryview(value)[30:170], bytearray(value[170:])])
    assert bytes(backend.get("a/b")) == value
    assert backend.size("a/b") == length
    assert list(backend.scan("a/")) == [Key("a/b", length)]
    assert backend.get("none") is backend.size("none") is None
    assert value[:50] not in inner.values["a/b"] or length < 4


def test_many_values_at_once(backend):
    backend.put("a", [b"1"])
    backend.put("b", [])
    assert [v and bytes(v) for v in backend.get_many(["b", "none", "a"])] == [b"", None, b"1"]


def test_real_segments(inner):
    backend = encrypted.EncryptedBackend(inner, "default", KEY)
    value = draw_bytes(3 * (1 << 20) + 5)
    backend.put("blob", [value])
    assert bytes(backend.get("blob")) == value
    assert backend.size("blob") == len(value)
    assert len(inner.values["blob"]) == len(value) + 4 * 32


def test_every_changed_byte_and_every_cut_voids_a_value(backend, inner, caplog):
    value = draw_bytes(250)
    backend.put("a", [value])
    good = inner.values["a"]
    with caplog.at_level(logging.WARNING):
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 1 << position % 8
            inner.values["a"] = bytes(bad)
            assert backend.get("a") == b""
        for length in range(len(good)):
            inner.values["a"] = good[:length]
            assert backend.get("a") == b""
            assert (backend.size("a") is None) == (
                (length % 132 < 32 and length % 132 > 0) or not length
            )
        inner.values["a"] = good + b"\0"
        assert backend.get("a") == b""
    assert len(caplog.records) == 1
    assert "void" in caplog.text


def test_segments_cannot_be_moved(backend, inner):
    backend.put("a", [draw_bytes(300)])
    old = inner.values["a"]
    backend.put("a", [draw_bytes(300)[::-1]])
    new = inner.values["a"]
    segments = [new[at : at + 132] for at in (0, 132, 264)]
    for wrong in (
        [segments[1], segments[0], segments[2]],
        segments[:2],
        [*segments, segments[2]],
        segments[1:],
        [old[:132], *segments[1:]],
        [segments[0], old[132:264], segments[2]],
    ):
        inner.values["a"] = b"".join(wrong)
        assert backend.get("a") == b""
    inner.values["a"] = segments[2]
    assert backend.get("a") == b""
    inner.values["b"] = new
    assert backend.get("b") == b""
    inner.values["a"] = new
    assert bytes(backend.get("a")) == draw_bytes(300)[::-1]


def test_equal_values_are_not_recognised(backend, inner):
    backend.put("a", [b"x" * 100])
    first = inner.values["a"]
    backend.put("a", [b"x" * 100])
    assert first[16:] != inner.values["a"][16:]


def test_names_hide_digests_and_nothing_else(backend, inner):
    names = [f"text/{DIGEST}", f"text/{OTHER}", f"kv/{DIGEST}.safetensors", "store"]
    names += [f"log/{number:020}" for number in range(12)]
    for name in names:
        backend.put(name, [b"1"])
    assert not [name for name in inner.values if DIGEST in name or OTHER in name]
    assert "store" in inner.values
    assert f"log/{3:020}" in inner.values
    assert [key.name for key in backend.scan("")] == sorted(names)
    for prefix in ("text/", "text/0", f"text/{OTHER}", "log/", "kv/", "st", "none/"):
        wanted = sorted(name for name in names if name.startswith(prefix))
        assert [key.name for key in backend.scan(prefix)] == wanted
        for after in (*names, "", "log/5", "text/", "text/5", "text/z", "zz"):
            behind = [name for name in wanted if name > after]
            assert [key.name for key in backend.scan(prefix, after)] == behind
    assert backend.delete(f"text/{DIGEST}")
    assert not backend.delete(f"text/{DIGEST}")
    assert backend.get(f"text/{DIGEST}") is None


def test_one_of_two_writers_gets_true(backend):
    assert backend.put_if_absent("a", [b"1"])
    assert not backend.put_if_absent("a", [b"2"])
    assert bytes(backend.get("a")) == b"1"


def test_names_that_were_made_without_the_key_are_not_seen(backend, inner):
    backend.put(f"text/{DIGEST}", [b"1"])
    (hidden,) = inner.values
    inner.values["text/" + DIGEST] = b"plain"
    inner.values[hidden[:-1] + ("0" if hidden[-1] != "0" else "1")] = inner.values[hidden]
    assert [key.name for key in backend.scan("text/")] == [f"text/{DIGEST}"]


@pytest.mark.parametrize(
    ("namespace", "master"), [("other", KEY), ("default", bytes(32))], ids=["namespace", "key"]
)
def test_another_key_is_refused_at_opening(backend, inner, namespace, master):
    backend.put(f"text/{DIGEST}", [b"1"])
    backend.put("store", [b"2"])
    with pytest.raises(StoreError, match="RAGKV_STORE_KEY"):
        encrypted.EncryptedBackend(inner, namespace, master)
    assert inner.closed
    inner.values["store"] = b"damaged"
    again = encrypted.EncryptedBackend(inner, "default", KEY)
    assert bytes(again.get(f"text/{DIGEST}")) == b"1"


def test_a_plain_store_is_refused(inner):
    inner.values[f"text/{DIGEST}"] = b"plain"
    inner.values["store"] = b"{}"
    with pytest.raises(StoreError, match="without encryption"):
        encrypted.EncryptedBackend(inner, "default", KEY)


@pytest.mark.parametrize("first", [b"{", b"7", b"\x00"], ids=["brace", "digit", "zero"])
def test_an_encrypted_store_is_refused_without_the_key(inner, first):
    """Whatever its first byte happens to be."""
    encrypted.EncryptedBackend(inner, "default", KEY).put("store", [b"{}"])
    inner.values["store"] = first + inner.values["store"][1:]
    with pytest.raises(StoreError, match="it is encrypted and was opened without"):
        ChunkStore(inner)


def test_the_key_from_the_environment(monkeypatch):
    monkeypatch.delenv(keys.KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="ragkv store key"):
        keys.key_from_environment()
    for wrong in ("short", base64.b64encode(bytes(31)).decode(), "ß", "=" * 44):
        monkeypatch.setenv(keys.KEY_VARIABLE, wrong)
        with pytest.raises(ConfigError, match="32 bytes in base64"):
            keys.key_from_environment()
    monkeypatch.setenv(keys.KEY_VARIABLE, keys.new_key())
    assert len(keys.key_from_environment()) == 32
    assert keys.new_key() != keys.new_key()
    with pytest.raises(ConfigError, match="32 bytes"):
        encrypted.EncryptedBackend(Plain(), "default", b"short")


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(
        __import__("sys").modules, "cryptography.hazmat.primitives.ciphers.aead", None
    )
    with pytest.raises(MissingDependencyError, match=r"\[crypt\]"):
        encrypted.EncryptedBackend(Plain(), "default", KEY)
