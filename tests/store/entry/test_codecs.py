"""The codecs against slow loops over single numbers; their error, size, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_entries import DTYPES, FINGERPRINT, make_entry, same

from ragkv.chunk.kv import ChunkKV
from ragkv.config import CODECS, StoreConfig
from ragkv.errors import ConfigError, StoreError
from ragkv.store.entry.codecs import LARGEST, GridCodec, codec_of
from ragkv.store.entry.format import decode, encode
from ragkv.store.entry.header import read_header

GRIDS = ("int8", "int4")
SHAPES = [(1, 1, 1), (2, 1, 16), (3, 5, 7), (2, 67, 16), (2, 130, 64), (1, 300, 5), (4, 9, 80)]


def layer(shape, dtype=torch.float32, seed=0):
    """Keys with channels far from 0 and values with tokens of different size, as models have."""
    heads, tokens, width = shape
    draw = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=draw)

    keys = normal(*shape) * normal(heads, 1, width).abs() + 8 * normal(heads, 1, width)
    values = normal(*shape) * normal(1, tokens, 1).exp()
    return keys.to(dtype), values.to(dtype)


def round_trip(name, keys, values):
    codec = codec_of(name)
    data = b"".join(codec.encode(keys, values))
    out = torch.full((2, *keys.shape), torch.nan, dtype=keys.dtype)
    assert codec.size(out.shape, out.dtype) == len(data)
    codec.decode(memoryview(bytearray(data)), out)
    return data, out[0], out[1]


# ---- the reference: one number after the other, numpy's float32 and float16


def groups(size, least):
    """Return the groups as lists of indices: equal lengths, the last may be shorter."""
    count = max(1, size // least)
    length = -(-size // count)
    return [list(range(at, min(at + length, size))) for at in range(0, size, length)]


def code(place, levels):
    return int(min(max(np.rint(place), 0), levels - 1))


def slow_keys(keys, levels, least):
    """Return codes, grids in their order, and what they decode to."""
    heads, tokens, width = keys.shape
    codes, decoded = np.zeros(keys.shape, dtype=int), np.zeros(keys.shape, dtype=np.float32)
    lows, steps = [], []
    for h in range(heads):
        for group in groups(tokens, least):
            for c in range(width):
                numbers = [np.float32(keys[h, t, c]) for t in group]
                smallest, largest = min(numbers), max(numbers)
                low = np.float16(smallest - abs(smallest) * np.float32(2.0**-11))
                step = np.float16((largest - np.float32(low)) / np.float32(levels - 1))
                lows.append(low)
                steps.append(step)
                for t, number in zip(group, numbers, strict=True):
                    divisor = np.float32(step) if step > 0 else np.float32(1)
                    codes[h, t, c] = code((number - np.float32(low)) / divisor, levels)
                    product = np.float32(codes[h, t, c]) * np.float32(step)
                    decoded[h, t, c] = product + np.float32(low)
    return codes, np.array(lows), np.array(steps), decoded


def slow_values(values, levels, least):
    heads, tokens, width = values.shape
    codes, decoded = np.zeros(values.shape, dtype=int), np.zeros(values.shape, dtype=np.float32)
    half = np.float32((levels - 1) / 2)
    together = groups(heads, -(-least // width))
    expected = np.zeros((len(together), tokens), dtype=np.float32)
    for number, group in enumerate(together):
        for t in range(tokens):
            numbers = [abs(np.float32(values[h, t, c])) for h in group for c in range(width)]
            expected[number, t] = max(numbers) / half
    unit = expected.max() / np.float32(255)
    units = np.zeros(expected.shape, dtype=np.uint8)
    for number, group in enumerate(together):
        for t in range(tokens):
            quotient = expected[number, t] / (unit if unit > 0 else np.float32(1))
            units[number, t] = min(int(np.ceil(quotient)), 255)
            step = np.float32(units[number, t]) * unit
            for h in group:
                for c in range(width):
                    divisor = step if step > 0 else np.float32(1)
                    codes[h, t, c] = code(np.float32(values[h, t, c]) / divisor + half, levels)
                    decoded[h, t, c] = (np.float32(codes[h, t, c]) - half) * step
    return codes, unit, units, decoded


def slow_codes(data, count, levels):
    if levels == 256:
        return list(data)
    half = (count + 1) // 2
    assert len(data) == half
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data][: count - half]


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_grids_are_the_slow_ones(name, shape):
    codec = codec_of(name)
    assert isinstance(codec, GridCodec)
    keys, values = layer(shape)
    data, keys_back, values_back = round_trip(name, keys, values)
    key_codes, low, step, slow_key = slow_keys(
        keys.numpy(), codec.grid.levels, codec.grid.key_group
    )
    value_codes, unit, units, slow_value = slow_values(
        values.numpy(), codec.grid.levels, codec.grid.value_group
    )
    # grids lie group by group, channels together: the order of the loops above
    grids = low.tobytes() + step.tobytes() + unit.tobytes() + units.tobytes()
    assert data[: len(grids)] == grids
    codes, count = data[len(grids) :], keys.numel()
    middle = len(codes) // 2
    assert slow_codes(codes[:middle], count, codec.grid.levels) == key_codes.reshape(-1).tolist()
    assert slow_codes(codes[middle:], count, codec.grid.levels) == value_codes.reshape(-1).tolist()
    assert np.array_equal(keys_back.numpy(), slow_key)
    assert np.array_equal(values_back.numpy(), slow_value)


def bounds(name, keys, values):
    """Return the largest error that each number may have: half a step, and roundings."""
    codec = codec_of(name)
    assert isinstance(codec, GridCodec)
    steps, tokens = codec.grid.levels - 1, keys.shape[1]
    key_bound, value_bound = torch.zeros_like(keys), torch.zeros_like(values)
    for group in groups(tokens, codec.grid.key_group):
        part = keys[:, group]
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        reach = high - low + 2.0**-10 * low.abs()
        key_bound[:, group] = reach / steps / 2 + reach * 2.0**-10 + 2.0**-24 * steps
    unit = values.abs().max() / (steps / 2) / 255
    for group in groups(len(values), -(-codec.grid.value_group // values.shape[2])):
        largest = values[group].abs().amax((0, 2), keepdim=True)
        value_bound[group] = (largest / (steps / 2) + unit) / 2 + largest * 1e-6
    return key_bound, value_bound


@st.composite
def layers(draw):
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 90), st.integers(1, 9)))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    kind = draw(st.sampled_from(["normal", "constant", "zero", "steps"]))
    scale = draw(st.sampled_from([1e-6, 1e-2, 1.0, 300.0, 1e4]))
    keys, values = layer(shape, seed=draw(st.integers(0, 99)))
    if kind == "constant":
        keys, values = torch.full(shape, 0.7), torch.full(shape, -0.3)
    if kind == "zero":
        keys, values = torch.zeros(shape), torch.zeros(shape)
    if kind == "steps":
        keys, values = keys.round(), values.round()
    keys, values = ((x * scale).clamp(-LARGEST, LARGEST).to(dtype) for x in (keys, values))
    return keys, values


@settings(max_examples=60, deadline=None)
@given(layers(), st.sampled_from(CODECS))
def test_any_layer_comes_back_within_half_a_step(numbers, name):
    keys, values = numbers
    _, keys_back, values_back = round_trip(name, keys, values)
    if codec_of(name).lossless:
        assert torch.equal(keys_back, keys)
        assert torch.equal(values_back, values)
        return
    limits = bounds(name, keys.float(), values.float())
    for found, expected, limit in zip((keys_back, values_back), numbers, limits, strict=True):
        rounding = torch.finfo(expected.dtype).eps * (expected.float().abs() + limit) + 1e-7
        assert bool(found.isfinite().all())
        assert bool(((found.float() - expected.float()).abs() <= limit + rounding).all())


@pytest.mark.parametrize("name", GRIDS)
def test_a_finer_grid_is_nearer(name):
    keys, values = layer((2, 256, 64))
    _, keys_back, values_back = round_trip(name, keys, values)
    limit = {"int8": 3e-4, "int4": 3e-2}[name]
    for found, expected, dim in ((keys_back, keys, 1), (values_back, values, 2)):
        error = (found - expected).square().mean(dim) / expected.var(dim)
        assert float(error.mean()) < limit


@pytest.mark.parametrize("tokens", [256, 257, 300, 511, 512, 1000])
@pytest.mark.parametrize(("heads", "width"), [(2, 64), (8, 128)])
def test_sizes(tokens, heads, width):
    shape = (heads, tokens, width)
    raw = 2 * 2 * heads * tokens * width
    keys, values = layer(shape, torch.bfloat16)
    sizes = {name: len(b"".join(codec_of(name).encode(keys, values))) for name in CODECS}
    assert sizes["raw"] == raw
    assert raw / sizes["int8"] > 1.9
    assert raw / sizes["int4"] > 3.9


def test_an_outlier_costs_its_own_group_alone():
    keys, values = layer((2, 300, 16))
    before = round_trip("int4", keys, values)
    keys[1, 5, 3], values[0, 7, 2] = 900.0, 40.0 * float(values.abs().max())
    after = round_trip("int4", keys, values)
    untouched = [c for c in range(16) if c != 3]
    assert torch.equal(after[1][0], before[1][0])
    assert torch.equal(after[1][1][:, untouched], before[1][1][:, untouched])


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("half", ["keys", "values"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 40000.0])
def test_what_no_grid_can_hold_is_refused(name, half, bad):
    keys, values = layer((2, 70, 4))
    (keys if half == "keys" else values)[1, 3, 2] = bad
    with pytest.raises(StoreError, match=f"codec {name} stores .* use codec raw"):
        codec_of(name).encode(keys, values)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_numbers_stay_finite(name, dtype):
    keys = torch.tensor([-LARGEST, LARGEST, 0.0]).view(1, 3, 1).to(dtype)
    for one in round_trip(name, keys, -keys)[1:]:
        assert bool(one.isfinite().all())
        assert float(one.abs().max()) == pytest.approx(LARGEST, rel=0.01)


@pytest.mark.parametrize("name", CODECS)
def test_tensors_may_be_views(name):
    keys, values = layer((2, 70, 8))
    spread = torch.stack([keys, values], dim=-1)
    assert round_trip(name, spread[..., 0], spread[..., 1])[0] == round_trip(name, keys, values)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_entries_in_every_codec_and_dtype(name, dtype):
    fingerprint = replace(FINGERPRINT, codec=name, dtype=dtype)
    entry = make_entry("text", layers=3, tokens=70, dtype=dtype)
    encoded = encode(entry, fingerprint)
    data = bytearray(b"".join(encoded))
    for copy in (False, True):
        found = decode(data, "text", fingerprint, copy=copy).entry
        assert found is not None
        assert found.keys.dtype == entry.keys.dtype
        if codec_of(name).lossless:
            assert same(found, entry)
        for layer_index, (keys, values) in enumerate(zip(entry.keys, entry.values, strict=True)):
            _, *expected = round_trip(name, keys, values)
            assert torch.equal(found.keys[layer_index], expected[0])
            assert torch.equal(found.values[layer_index], expected[1])
    other = replace(fingerprint, codec="int8" if name == "raw" else "raw")
    assert decode(data, "text", other).reason == "fingerprint"


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_no_flipped_bit_goes_unnoticed(name):
    fingerprint = replace(FINGERPRINT, codec=name)
    entry = make_entry("text", heads=1, tokens=2)
    data = bytearray(b"".join(encode(entry, fingerprint)))
    expected = decode(data, "text", fingerprint).entry
    assert expected is not None
    start = read_header(data)[1]
    for position in range(start, len(data)):
        data[position] ^= 1
        assert decode(data, "text", fingerprint).reason == "checksum"
        data[position] ^= 1
    assert same(decode(data, "text", fingerprint).entry, expected)


@pytest.mark.parametrize("name", CODECS)
def test_bytes_of_another_layer_are_refused(name):
    codec = codec_of(name)
    keys, values = layer((2, 9, 4))
    data = b"".join(codec.encode(keys, values))
    other = torch.empty(2, 2, 10, 4)
    assert codec.size(other.shape, other.dtype) != len(data)


def test_unknown_codecs():
    for name in ("int2", "raw+zstd", 4, None):
        with pytest.raises(ConfigError, match="codec must be one of raw, int8"):
            StoreConfig(codec=name)
    with pytest.raises(StoreError, match="unknown codec 'int2'"):
        codec_of("int2")


def test_an_engine_stores_in_its_codec(make_engine, tmp_path):
    text = "The first of several words that stand in this chunk, and some more of them."
    for name in ("raw", "int4"):
        kv = make_engine(store=StoreConfig(tmp_path, codec=name))
        assert not kv.contains(text)
        kv.precompute([text])
        assert kv.contains(text)
        sink = kv._reuse.corpus.sinks.configured(kv.reuse)
        assert sink.fingerprint.codec == name
        entry = kv._reuse.corpus.get(text, sink).entry
        assert isinstance(entry, ChunkKV)
    sizes = sorted(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert len(sizes) == 2
    assert sizes[0] < 0.6 * sizes[1]
