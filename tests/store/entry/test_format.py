"""The entry format: what the file holds, and that no byte of it can lie."""

import json
from dataclasses import replace

import pytest
import safetensors
import torch
from blake3 import blake3
from store_entries import DTYPES, FINGERPRINT, OTHER, make_entry, same
from xxhash import xxh3_128

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.entry.format import decode, encode
from ragkv.store.entry.header import read_header

TEXT = 'a "chunk"'
TINY = make_entry(TEXT, layers=2, heads=1, tokens=2)


def to_bytes(entry: ChunkKV, fingerprint: Fingerprint = FINGERPRINT) -> bytearray:
    return bytearray(b"".join(encode(entry, fingerprint)))


def changed_header(data: bytearray, old: str, new: str) -> bytearray:
    """Change the header and make its checksum hold again, as a forger would."""
    start = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:start].decode().replace(old, new))
    table["__metadata__"].pop("checksum")
    canonical = json.dumps(table, sort_keys=True, separators=(",", ":"))
    table["__metadata__"]["checksum"] = blake3(canonical.encode()).hexdigest(length=16)
    header = json.dumps(table).encode()
    return bytearray(len(header).to_bytes(8, "little") + header + data[start:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_programs_can_read_it(tmp_path, dtype):
    entry = make_entry(TEXT, layers=3, dtype=dtype)
    path = tmp_path / "entry.safetensors"
    path.write_bytes(to_bytes(entry, replace(FINGERPRINT, dtype=dtype)))
    with safetensors.safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == ["layer.0", "layer.1", "layer.2", "offsets", "token_ids"]
        layer = file.get_tensor("layer.1")
        checksums = json.loads(file.metadata()["layer_checksums"])
        tokens = file.get_tensor("token_ids"), file.get_tensor("offsets")
        assert json.loads(file.metadata()["fingerprint"])["weights"] == "weights"
    assert torch.equal(layer, torch.stack([entry.keys[1], entry.values[1]]))
    raw = layer.contiguous().view(-1).view(torch.uint8).numpy()
    assert xxh3_128(raw).hexdigest() == checksums[1]
    assert tokens[0].tolist() == entry.token_ids.tolist()
    assert tokens[1].tolist() == entry.offsets.tolist()


def test_data_is_aligned():
    for length in range(70):
        data = to_bytes(make_entry("x" * length))
        assert read_header(data)[1] % 64 == 0


def test_views_or_a_copy(tmp_path):
    data = to_bytes(TINY)
    view, own = (decode(data, TEXT, FINGERPRINT, copy=copy).entry for copy in (False, True))
    assert view is not None
    assert own is not None
    assert same(view, TINY)
    data[-30] ^= 0xFF
    data[read_header(to_bytes(TINY))[1]] ^= 0xFF
    assert not same(view, TINY)
    assert same(own, TINY)


def test_no_flipped_bit_goes_unnoticed():
    data = to_bytes(TINY)
    assert same(decode(data, TEXT, FINGERPRINT).entry, TINY)
    reasons = set()
    for position in range(len(data)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255, ord(" ") ^ ord("\t")):
            data[position] ^= mask
            lookup = decode(data, TEXT, FINGERPRINT)
            assert lookup.entry is None or same(lookup.entry, TINY), (position, mask)
            reasons.add(lookup.reason)
            data[position] ^= mask
    assert reasons == {"", "unreadable", "format", "checksum"}  # "": blanks behind the header


def test_no_cut_or_lengthened_file_goes_unnoticed():
    data = to_bytes(TINY)
    for length in range(len(data)):
        assert decode(data[:length], TEXT, FINGERPRINT).reason == "unreadable"
    for more in (b"\0", b"more", bytes(data)):
        assert decode(data + more, TEXT, FINGERPRINT).reason == "unreadable"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04N.",
        b"\x02" + b"\0" * 7 + b"{}",
        b"\x02" + b"\0" * 7 + b"[]",
        b"\xff" * 64,
        (9**6).to_bytes(8, "little") + b"[" * 9**6,
    ],
    ids=["empty", "pickle", "no entry", "list", "huge", "nested"],
)
def test_other_bytes_are_refused(data):
    assert decode(data, TEXT, FINGERPRINT).reason in {"unreadable", "format"}


def test_foreign_entries_are_refused():
    assert decode(to_bytes(TINY, OTHER), TEXT, FINGERPRINT).reason == "fingerprint"
    assert decode(to_bytes(make_entry("b")), TEXT, FINGERPRINT).reason == "tokens"
    lone, whole = "\ud83d" + "\ude00", "\N{GRINNING FACE}"
    assert decode(to_bytes(make_entry(lone)), whole, FINGERPRINT).reason == "tokens"


def test_unknown_versions_are_refused_by_name(caplog):
    data = changed_header(to_bytes(TINY), '"ragkv":"2"', '"ragkv":"3"')
    assert decode(data, TEXT, FINGERPRINT).reason == "format"
    assert "entry format '3'; this ragkv reads 2" in caplog.text
    other = changed_header(changed_header(data, '"3"', '"1"'), '"layer.', '"kv.')
    assert decode(other, TEXT, FINGERPRINT).reason == "format"
    assert "entry format '1'; this ragkv reads 2" in caplog.text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[2,2,1,2,4]", "[2,2,1,4,2]"),
        ("[2,2,1,2,4]", "[4,1,1,2,4]"),
        ("[2,2,1,2,4]", "[-2,2,-1,2,4]"),
        ("[2,2,1,2,4]", "[2,2,-1,2,-4]"),
        ("[2,2,1,2,4]", '[\\"2\\",2,1,2,4]'),
        ("[2,2,1,2,4]", "[2,2,1,2]"),
        ("[2,2,1,2,4]", "[2,2,1,2,0]"),
        ("[2,2,1,2,4]", "[]"),
        ("[2,2,1,2,4]", "[100000000,2,1,2,4]"),
        ("[2,1,2,4]", "[2,1,2,3]"),
        ('"F32"', '"I32"'),
        ('"F32"', '"F99"'),
        ('"F32"', "[]"),
        ('"layer.1"', '"layer.2"'),
        ('"offsets"', '"offset"'),
        ('"data_offsets":[0,64]', '"data_offsets":[0,60]'),
        ('"data_offsets":[0,64]', '"data_offsets":[0]'),
        ('"data_offsets":[0,64]', '"data_offsets":[64,0]'),
        ('\\"codec\\":\\"raw\\"', '\\"codec\\":\\"int2\\"'),
        ('\\"codec\\":\\"raw\\"', '\\"codec\\":[]'),
        ('"versions":"[]"', '"versions":"[1]"'),
        ('"versions":"[]"', '"versions":"[{}]"'),
        ('"text":"a', '"text":"\\\\q'),
        ('"text":"a', '"text":"é'),
        ('\\"sink\\":\\"sink\\"', '\\"drain\\":\\"sink\\"'),
        ('"fingerprint"', '"fingerprnt"'),
        ('"fingerprint":"{', '"fingerprint":"'),
    ],
)
def test_forged_headers_are_refused(old, new):
    data = to_bytes(TINY)
    assert same(decode(changed_header(data, "nothing", ""), TEXT, FINGERPRINT).entry, TINY)
    assert old.encode() in data
    assert decode(changed_header(data, old, new), TEXT, FINGERPRINT).reason == "format"


def test_entries_that_cannot_be_stored():
    with pytest.raises(StoreError, match="unknown codec 'int2'; known: raw, int8"):
        encode(TINY, replace(FINGERPRINT, codec="int2"))
    with pytest.raises(StoreError, match="float32 keys do not fit the fingerprint's bfloat16"):
        encode(TINY, replace(FINGERPRINT, dtype="bfloat16"))
    with pytest.raises(ValueError, match="differ"):
        encode(replace(TINY, values=TINY.values[:1]), FINGERPRINT)
    with pytest.raises(ValueError, match="one row for each token"):
        encode(replace(TINY, token_ids=TINY.token_ids[:1]), FINGERPRINT)
    with pytest.raises(ValueError, match="without tokens"):
        encode(make_entry(TEXT, tokens=0), FINGERPRINT)
