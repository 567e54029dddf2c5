"""Restoring and encoding against the store's layout, written out in numpy loops."""

import math

import numpy as np
import pytest
import torch
from pairwise import all_pairs
from ragkv_kernels import INT4, INT8, Grid, twins

SMALL = Grid(levels=16, key_group=16, value_group=48)


def operation(side, name):
    if side == "twin":
        return getattr(twins, name)
    if name == "encode":
        from ragkv_kernels.gpu.encode import encode

        return encode
    from ragkv_kernels.gpu import place, restore

    return place.place if name == "place" else getattr(restore, name)


def place(side, parts, *buffer, rows, slots, **more):
    """Place the rows of one entry, or as many of each of several."""
    counts = [len(rows) // len(parts)] * len(parts)
    part_of = torch.arange(len(parts), device=rows.device).repeat_interleave(counts[0])
    operation(side, "place")(
        parts, *buffer, counts=counts, part_of=part_of, rows=rows, slots=slots, **more
    )


def draw(heads, tokens, width, dtype=torch.float32, half=None):
    torch.manual_seed(tokens)
    keys, values = torch.randn(2, heads, tokens, width).mul(3).to(dtype)
    angles = torch.rand(tokens, width // 2 if half is None else half) * 6
    return keys, values, (1.2 * angles.cos(), 1.2 * angles.sin())


def turned(keys, table):
    """Rotate by complex numbers, in float64."""
    cos, sin = (part.double().cpu().numpy() for part in table)
    half = cos.shape[1]
    out = keys.double().cpu().numpy().copy()
    number = (out[..., :half] + 1j * out[..., half : 2 * half]) * (cos + 1j * sin)
    out[..., :half], out[..., half : 2 * half] = number.real, number.imag
    return out


def bounds(tokens, least):
    length = math.ceil(tokens / max(1, tokens // least))
    return [(first, min(first + length, tokens)) for first in range(0, tokens, length)]


def decoded(data, shape, grid):
    """Read the bytes number by number, as docs say they lie."""
    heads, tokens, width = shape
    raw = data.cpu().numpy().tobytes()
    groups = bounds(tokens, grid.key_group)
    shares = bounds(heads, math.ceil(grid.value_group / width))
    at = 0

    def take(kind, count):
        nonlocal at
        part = np.frombuffer(raw, kind, count, at)
        at += part.nbytes
        return part

    low = take("<f2", heads * len(groups) * width).reshape(heads, len(groups), width)
    step = take("<f2", heads * len(groups) * width).reshape(heads, len(groups), width)
    unit = take("<f4", 1)[0]
    value_step = take("u1", len(shares) * tokens).reshape(len(shares), tokens)
    codes = []
    for _ in range(2):
        count = heads * tokens * width
        if grid.levels == 256:
            codes.append(take("u1", count).reshape(shape))
        else:
            part = take("u1", (count + 1) // 2)
            codes.append(np.concatenate([part & 15, part >> 4])[:count].reshape(shape))
    assert at == len(raw)
    keys, values = np.zeros(shape), np.zeros(shape)
    for h in range(heads):
        for number, (first, last) in enumerate(groups):
            span = slice(first, last)
            keys[h, span] = codes[0][h, span] * step[h, number].astype(float) + low[h, number]
        share = next(n for n, (first, last) in enumerate(shares) if first <= h < last)
        scale = value_step[share].astype(float) * unit
        values[h] = (codes[1][h] - (grid.levels - 1) / 2) * scale[:, None]
    return keys, values


GRIDS = [INT8, INT4, SMALL]
SHAPES = [(2, 131, 64, 32), (3, 21, 32, 16), (4, 1, 64, 32), (2, 40, 80, 16), (5, 7, 96, 48)]
"""Heads, tokens, head size, and half the channels that turn."""


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_encoded_bytes_hold_the_numbers(side, device, shape, grid):
    heads, tokens, width, _ = shape
    keys, values, _ = draw(heads, tokens, width)
    made = operation(side, "encode")(keys.to(device), values.to(device), grid=grid)
    plain = keys.numpy()
    got_keys, got_values = decoded(made.data, (heads, tokens, width), grid)
    for first, last in bounds(tokens, grid.key_group):
        span = slice(first, last)
        reach = plain[:, span].max(1, keepdims=True) - plain[:, span].min(1, keepdims=True)
        # half a step, and float16's rounding of the grid itself
        limit = reach / (grid.levels - 1) * 0.52 + np.abs(plain[:, span]).max() * 2**-9
        assert (np.abs(got_keys[:, span] - plain[:, span]) <= limit).all()
    limit = values.abs().max() / (grid.levels - 1) * 1.1 + 1e-6
    assert np.abs(got_values - values.numpy()).max() <= float(limit)
    expected = max(np.abs(plain).max(), float(values.abs().max()))
    assert float(made.largest) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("grid", "shape", "dtype"), all_pairs(GRIDS, SHAPES, [torch.float32, torch.bfloat16]), ids=str
)
def test_kernel_and_twin_make_the_same_bytes(device, grid, shape, dtype):
    heads, tokens, width, _ = shape
    keys, values, _ = draw(heads, tokens, width, dtype)
    # any strides
    keys = keys.to(device).transpose(0, 1).contiguous().transpose(0, 1)
    values = torch.cat([values, values], dim=1).to(device)[:, :tokens]
    theirs = twins.encode(keys, values, grid=grid)
    ours = operation("triton", "encode")(keys, values, grid=grid)
    assert torch.equal(ours.data, theirs.data)
    assert torch.equal(ours.largest, theirs.largest)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(2, 150, 64), (4, 70, 128), (3, 21, 80), (1, 1, 96)], ids=str)
def test_the_store_codecs_make_the_same_bytes(side, device, name, shape):
    codecs = pytest.importorskip("ragkv.store.entry.codecs", reason="a store without codecs")
    codec, grid = codecs.codec_of(name), {"int8": INT8, "int4": INT4}[name]
    assert codec.grid == grid
    parts = [part.to(device) for part in draw(*shape)[:2]]
    made = operation(side, "encode")(*parts, grid=grid)
    data = b"".join(codec.encode(*parts))
    assert made.data.cpu().numpy().tobytes() == data
    still = torch.ones(shape[1], 1, device=device), torch.zeros(shape[1], 1, device=device)
    rows = torch.arange(shape[1], device=device)
    for dtype in (torch.float32, torch.float16):  # not bfloat16: the interpreter cuts it
        expected = torch.empty(2, *shape, dtype=dtype)
        codec.decode(memoryview(bytearray(data)), expected)
        out = torch.empty(2, 1, *shape, dtype=dtype, device=device)
        operation(side, "restore")(
            made.data[None], shape[1], *out, rows=rows, slots=rows, table=still, grid=grid
        )
        assert torch.equal(out[:, 0].cpu(), expected)


@pytest.mark.parametrize("number", [0.0, 1.5, -3.0])
def test_equal_numbers_come_back(side, device, number):
    keys = torch.full((2, 70, 64), number, device=device)
    made = operation(side, "encode")(keys, keys, grid=INT8)
    got_keys, got_values = decoded(made.data, (2, 70, 64), INT8)
    np.testing.assert_allclose(got_keys, number, rtol=1e-3)
    np.testing.assert_allclose(got_values, number, rtol=1e-2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("where", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e6])
def test_what_no_codec_can_keep_is_told(side, device, where, number):
    both = torch.ones(2, 2, 9, 64, device=device)
    both[where, 1, 4, 40] = number
    made = operation(side, "encode")(*both, grid=INT8)
    assert not float(made.largest) <= 32768


def moves(tokens, half, device):
    """Return rows, slots, a table by slot, and the table of the rows."""
    rows = torch.tensor([row for row in range(tokens) if row % 5 != 2])
    slots = 200 - rows
    angles = torch.rand(220, half) * 6
    table = 1.2 * angles.cos(), 1.2 * angles.sin()
    given = rows.to(device), slots.to(device), tuple(part.to(device) for part in table)
    return given, tuple(part[slots] for part in table)


def assert_moved(buffer, plain, given, table):
    """Compare with ``plain`` keys and values, ``[layers, heads, tokens, width]``."""
    rows, slots, _ = (part if isinstance(part, tuple) else part.cpu() for part in given)
    expected = torch.full(buffer.shape, 7.0).double().numpy()
    for layer, (keys, values) in enumerate(zip(*plain, strict=True)):
        expected[0, layer][:, slots] = turned(torch.tensor(keys[:, rows]), table)
        expected[1, layer][:, slots] = values[:, rows]
    # a whole unit in the last place: Triton's interpreter cuts bfloat16 where a GPU rounds
    limit = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[buffer.dtype]
    np.testing.assert_allclose(buffer.double().cpu(), expected, atol=1e-5, rtol=limit)


def empty_buffer(layers, heads, width, dtype, device):
    made = torch.full((2, layers, 256, heads, width), 7.0, dtype=dtype, device=device)
    return made.transpose(2, 3)


KINDS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("grid", "shape", "dtype", "askew"), all_pairs(GRIDS, SHAPES, KINDS, [False, True]), ids=str
)
def test_rows_are_restored_at_their_slots(side, device, grid, shape, dtype, askew):
    if side == "triton" and dtype == torch.bfloat16 and device.type == "cpu":
        dtype = torch.float16  # the interpreter cuts bfloat16 twice
    heads, tokens, width, half = shape
    keys, values, _ = draw(3 * heads, tokens, width, dtype, half)
    coded = [
        twins.encode(*layer, grid=grid).data
        for layer in zip(keys.split(heads), values.split(heads), strict=True)
    ]
    plain = [decoded(data, shape[:3], grid) for data in coded]
    rounded = [[torch.tensor(part).to(dtype).double().numpy() for part in one] for one in plain]
    size = len(coded[0])
    first, step = (3, size + 5) if askew else (0, -(-size // 16) * 16)
    data = torch.zeros(3, first + step, dtype=torch.uint8)
    data[:, first : first + size] = torch.stack(coded)
    given, table = moves(tokens, half, device)
    rows, slots, by_slot = given
    buffer = empty_buffer(3, heads, width, dtype, device)
    operation(side, "restore")(
        data.to(device)[:, first : first + size],
        tokens,
        *buffer,
        rows=rows,
        slots=slots,
        table=by_slot,
        grid=grid,
    )
    assert_moved(buffer, list(zip(*rounded, strict=True)), given, table)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_rows_are_moved_to_their_slots(side, device, shape, dtype):
    heads, tokens, width, half = shape
    keys, values, _ = draw(3 * heads, tokens, width, dtype, half)
    cached = [part.view(3, heads, tokens, width) for part in (keys, values)]
    given, table = moves(tokens, half, device)
    rows, slots, by_slot = given
    buffer = empty_buffer(3, heads, width, dtype, device)
    # any strides
    keys, values = torch.stack([cached[0], cached[1]], dim=3).to(device).unbind(3)
    place(side, [(keys, values)], *buffer, rows=rows, slots=slots, table=by_slot)
    assert_moved(buffer, [part.double().numpy() for part in cached], given, table)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_rows_of_several_entries_are_placed_at_once(side, device, dtype):
    """Of other lengths and strides, with keys and values together and apart."""
    heads, width, half = 2, 64, 32
    keys, values, _ = draw(3 * heads, 40, width, dtype, half)
    cached = [part.view(3, heads, 40, width) for part in (keys, values)]
    (rows, slots, by_slot), table = moves(40, half, device)
    whole = torch.stack(cached, dim=1).to(device)
    parts = [
        (whole[:, 0], whole[:, 1]),
        tuple(part[:, :, : int(rows[-1]) + 1].to(device) for part in cached),
    ]
    both = torch.cat([rows[:16], rows[16:]])
    buffer = empty_buffer(3, heads, width, dtype, device)
    place(side, parts, *buffer, rows=both, slots=slots, table=by_slot)
    given = rows, slots, by_slot
    assert_moved(buffer, [part.double().numpy() for part in cached], given, table)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neighbours_turn_together(side, device, shape):
    """As halves do, were the channels in another order."""
    heads, tokens, width, half = shape
    keys, values, _ = draw(3 * heads, tokens, width, torch.float32, half)
    cached = [part.view(3, heads, tokens, width) for part in (keys, values)]
    (rows, slots, by_slot), table = moves(tokens, half, device)
    buffer = empty_buffer(3, heads, width, torch.float32, device)
    where = {"rows": rows, "slots": slots, "table": by_slot, "adjacent": True}
    place(side, [tuple(part.to(device) for part in cached)], *buffer, **where)
    channels = torch.arange(width)
    order = torch.cat([channels[: 2 * half : 2], channels[1 : 2 * half : 2], channels[2 * half :]])
    buffer = torch.stack([buffer[0][..., order], buffer[1]])
    cached[0] = cached[0][..., order]
    assert_moved(buffer, [part.double().numpy() for part in cached], (rows, slots, by_slot), table)


def test_no_rows_write_nothing(side, device):
    buffer = torch.full((2, 1, 2, 9, 64), 7.0, device=device)
    none, table = torch.empty(0, dtype=torch.long, device=device), torch.empty(9, 32, device=device)
    cached = torch.zeros(2, 1, 2, 5, 64, device=device)
    place(side, [tuple(cached)], *buffer, rows=none, slots=none, table=(table, table))
    assert (buffer == 7).all()
