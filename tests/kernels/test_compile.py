"""Triton's compiler takes every kernel, without a GPU, and each fits a GPU's shared memory."""

from types import SimpleNamespace

import pytest
import torch
from ragkv_kernels import INT4, INT8, RowTable, Stretches

pytest.importorskip("triton", reason="needs Triton")

import triton
from ragkv_kernels.gpu import attend as attending
from ragkv_kernels.gpu import drift as drifting
from ragkv_kernels.gpu import encode as encoding
from ragkv_kernels.gpu import paid as paying
from ragkv_kernels.gpu import place as placing
from ragkv_kernels.gpu import restore as restoring
from ragkv_kernels.gpu import rows as row_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = 99 << 10
"""Bytes that one program may take on the smallest GPU of compute capability 8."""

KINDS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
}


class Compiled:
    """Stands in for a kernel: a launch compiles it."""

    def __init__(self, kernel, target, found):
        self._kernel, self._target, self._found = kernel, target, found

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *args, **kwargs):
        source, options = self._variant(args, kwargs)
        made = triton.compile(source, target=self._target, options=options)
        self._found.append((self._kernel.__name__, made.metadata.shared))

    def _variant(self, args, kwargs):
        options = {
            name: kwargs.pop(name)
            for name in ("num_warps", "num_stages", "enable_fp_fusion")
            if name in kwargs
        }
        given = {**dict(zip(self._kernel.arg_names, args, strict=False)), **kwargs}
        given = {name: given[name] for name in self._kernel.arg_names}
        params = {p.name: p for p in self._kernel.params}
        constants = {
            name: value
            for name, value in given.items()
            if params[name].is_constexpr or (one(value) and not params[name].do_not_specialize)
        }
        signature = {
            name: "constexpr" if name in constants else kind_of(value)
            for name, value in given.items()
        }
        aligned = {
            (number,): [["tt.divisibility", 16]]
            for number, name in enumerate(given)
            if name not in constants and is_aligned(given[name], params[name])
        }
        return ASTSource(self._kernel, signature, constants, aligned), options


class Noted(Compiled):
    """Stands in for a kernel: a launch notes what would be compiled for it."""

    def _launch(self, *args, **kwargs):
        source, options = self._variant(args, kwargs)
        self._found.append((self._kernel.__name__, source.hash(), str(options)))


def one(value):
    """Whether Triton compiles the number in, as it does with a stride of 1."""
    return isinstance(value, int) and value == 1


def is_aligned(value, param):
    """Whether Triton is told that the number, or the tensor's place, is a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0 and not param.do_not_specialize_on_alignment
    return isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize


def kind_of(value):
    if isinstance(value, torch.Tensor):
        return KINDS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


KERNELS = (
    (attending, ["_attend", "_join"]),
    (row_kernels, ["_attend_rows", "_write_rows", "_paid_rows"]),
    (paying, ["_paid"]),
    (drifting, ["_shifts", "_move"]),
    (placing, ["_place"]),
    (restoring, ["_restore"]),
    (encoding, ["_encode_keys", "_size_values", "_encode_values"]),
)


def replace_kernels(monkeypatch, stand_in, target=None):
    """Replace every kernel; return the list of what the launches find."""
    found = []
    for module, names in KERNELS:
        for name in names:
            monkeypatch.setattr(module, name, stand_in(getattr(module, name), target, found))
    return found


@pytest.fixture(params=[80, 90])
def compiled(request, monkeypatch):
    found = replace_kernels(monkeypatch, Compiled, GPUTarget("cuda", request.param, 32))
    yield found
    assert found
    assert all(shared <= SHARED for _, shared in found), found


@pytest.fixture
def noted(monkeypatch):
    return replace_kernels(monkeypatch, Noted)


@pytest.fixture
def multiprocessors(monkeypatch):
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "dtype", "window", "splits"),
    [
        (128, torch.bfloat16, None, 1),
        (64, torch.float16, 50, 4),
        (80, torch.bfloat16, 50, 1),
        (128, torch.float32, None, 1),
        (256, torch.float32, 50, 4),
        (256, torch.float16, None, 1),
    ],
)
def test_attention_compiles(compiled, width, dtype, window, splits):
    query, key = torch.zeros(7, 300, width, dtype=dtype), torch.zeros(1, 400, width, dtype=dtype)
    attending.attend(query, key, key, torch.arange(300), window=window, scaling=1.0, splits=splits)
    lse = torch.zeros(7, 300)
    paying.paid(query, key, torch.arange(300), lse, window=window, scaling=1.0)
    assert {name for name, _ in compiled} >= {"_attend", "_paid"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adjacent", [False, True])
def test_drift_compiles(compiled, dtype, adjacent):
    keys, fresh = torch.zeros(4, 600, 128, dtype=dtype), torch.zeros(4, 90, 128, dtype=dtype)
    numbers = torch.zeros(4, 2, dtype=torch.long)
    stretches = Stretches(
        *(torch.zeros(2, 512, 40), *numbers),
        *(torch.arange(90), torch.arange(90), torch.ones(90), torch.zeros(600, dtype=torch.bool)),
    )
    table = torch.ones(600, 64), torch.zeros(600, 64)
    drifting.drift((keys, keys), (fresh, fresh), None, stretches, table=table, adjacent=adjacent)
    assert {name for name, _ in compiled} == {"_shifts", "_move"}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("window", [None, 50])
def test_rows_in_a_table_compile(compiled, rows, window):
    shape, cpu = (2, 4, 128), torch.device("cpu")
    table = RowTable(rows, 7, shape, dtype=torch.bfloat16, device=cpu)
    query, keys = torch.zeros(28, rows, 128).bfloat16(), torch.zeros(4, rows, 128).bfloat16()
    row_kernels.attend_rows(query, table, 1, window=window, scaling=1.0, splits=4)
    row_kernels.write_rows(keys, keys, table, 1)
    lse = torch.zeros(28, rows)
    row_kernels.paid_rows(query, table, 1, lse, room=4096, window=window, scaling=1.0)
    assert {name for name, _ in compiled} >= {"_attend_rows", "_write_rows", "_paid_rows"}


@pytest.mark.slow
@pytest.mark.parametrize("grid", [None, INT8, INT4], ids=["raw", "int8", "int4"])
def test_codes_compile(compiled, grid):
    keys = torch.ones(2, 600, 128, dtype=torch.bfloat16)
    table = torch.ones(600, 64), torch.zeros(600, 64)
    rows = torch.arange(600)
    buffer = torch.ones(2, 3, *keys.shape, dtype=keys.dtype)
    moves = {"rows": rows, "slots": rows, "table": table}
    if grid is None:
        more = {"counts": [600], "part_of": torch.zeros_like(rows)}
        placing.place([buffer.unbind()], *buffer, **moves, **more)
    else:
        data = encoding.encode(keys, keys, grid=grid).data
        restoring.restore(data.expand(3, -1), 600, *buffer, grid=grid, **moves)


@pytest.mark.usefixtures("multiprocessors")
def test_few_variants_are_compiled_whatever_the_rows(noted):
    """What is compiled in the midst of an answer takes seconds."""
    keys = torch.empty(4, 32768, 128, dtype=torch.bfloat16)
    for rows in range(1, 700):
        query = torch.empty(rows, 28, 128, dtype=torch.bfloat16).transpose(0, 1)
        attending.attend(query, keys, keys, torch.arange(rows), window=None, scaling=1.0)
    assert {name for name, *_ in noted} == {"_attend", "_join"}
    assert len(set(noted)) == 4


@pytest.mark.parametrize("grid", [INT8, INT4], ids=["int8", "int4"])
def test_one_variant_restores_chunks_of_any_length(noted, grid):
    for tokens in range(300, 420):
        table = torch.ones(tokens, 64), torch.zeros(tokens, 64)
        rows = torch.arange(tokens)
        buffer = torch.empty(2, 4, 4, 512, 128, dtype=torch.bfloat16)
        size = sum(grid.sizes((4, tokens, 128)))
        data = torch.empty(4, -(-size // 16) * 16, dtype=torch.uint8)[:, :size]
        moves = {"rows": rows, "slots": rows, "table": table}
        restoring.restore(data, tokens, *buffer, grid=grid, **moves)
    assert len(noted) == 120
    assert len(set(noted)) == 1


@pytest.mark.parametrize(
    ("programs", "most", "expected"),
    [(4, 64, 64), (40, 64, 6), (4, 2, 2), (4, 1, 1), (1000, 64, 1)],
    ids=["few-rows", "some", "short", "shorter", "many-rows"],
)
@pytest.mark.usefixtures("multiprocessors")
def test_programs_share_keys_where_rows_are_few(programs, most, expected):
    assert attending.splits_of(torch.device("cuda"), programs, most) == expected
