"""Rows of several caches, given by address: each cache's part is `attend` over that cache."""

from functools import partial

import pytest
import ragkv_kernels
import torch
from pairwise import all_pairs
from ragkv_kernels import CacheRows, RowTable, twins

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
LAYERS, KV_HEADS = 3, 2


def side_of(side):
    if side == "twin":
        return twins.attend_rows, twins.write_rows
    from ragkv_kernels.gpu import rows

    return partial(rows.attend_rows, splits=3), rows.write_rows


def caches(lengths, width, dtype, device):
    torch.manual_seed(sum(lengths))
    return [
        torch.randn(2, LAYERS, KV_HEADS, length + 5, width).to(device, dtype).unbind()
        for length in lengths
    ]


def table_of(rows, group, width, dtype, device, **more):
    shape = LAYERS, KV_HEADS, width
    return RowTable(rows, group, shape, dtype=dtype, device=torch.device(device), **more)


def part(positions, cache):
    ids = torch.arange(len(positions)).numpy()
    return CacheRows(ids, torch.tensor(positions).numpy(), *cache)


PASSES = {
    "steps": (4, 7, [[90], [33, 34], [0]]),
    "repairs": (8, 3, [[3, 60, 61, 120, 121], [70]]),
    "many": (32, 4, [list(range(40, 64)), [129]]),
}


@pytest.mark.parametrize(
    ("name", "window", "dtype"), all_pairs([*PASSES], [None, 20], [*TOLERANCE]), ids=str
)
def test_rows_attend_to_their_own_caches(side, device, name, window, dtype):
    attend_rows, _ = side_of(side)
    rows, group, positions = PASSES[name]
    width, scaling = 64, 0.125
    of = caches([max(each) + 1 for each in positions], width, dtype, device)
    table = table_of(rows, group, width, dtype, device)
    query = torch.randn(KV_HEADS * group, rows, width).to(device, dtype)
    for _ in range(2):  # the same tensors with other numbers in them
        table.fill([part(at, cache) for at, cache in zip(positions, of, strict=True)])
        out, lse = attend_rows(query, table, 1, window=window, scaling=scaling)
        first = 0
        for at, (keys, values) in zip(positions, of, strict=True):
            mine = slice(first, first + len(at))
            where = torch.tensor(at, device=device)
            want, mass = twins.attend(
                query[:, mine], keys[1], values[1], where, window=window, scaling=scaling
            )
            torch.testing.assert_close(out[:, mine], want, atol=TOLERANCE[dtype], rtol=0)
            torch.testing.assert_close(lse[:, mine], mass, atol=TOLERANCE[dtype], rtol=0)
            first = mine.stop
        assert out.isfinite().all()  # padding too
        positions, of = positions[::-1], of[::-1]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("observed", [1, 5])
def test_observed_rows_pay_as_they_do_alone(side, device, window, observed):
    attend_rows, _ = side_of(side)
    paid_rows = twins.paid_rows
    if side == "triton":
        from ragkv_kernels.gpu.rows import paid_rows
    (cache,) = caches([150], 64, torch.float32, device)
    table = table_of(32, 3, 64, torch.float32, device, several=False)
    at = [3, 60, 61, 90, 120, 146, 147, 149]
    table.fill([part(at, cache)], observed=observed)
    query, where = torch.randn(KV_HEADS * 3, 32, 64).to(device), torch.tensor(at, device=device)
    how = {"window": window, "scaling": 0.125}
    _, lse = attend_rows(query, table, 1, **how)
    rows = slice(len(at) - observed, len(at))
    found = paid_rows(query, table, 1, lse, room=256, **how)
    keys, values = (each[1] for each in cache)
    _, mass = twins.attend(query[:, : len(at)], keys, values, where, **how)
    want = twins.paid(query[:, rows], keys, where[rows], mass[:, rows], **how)
    torch.testing.assert_close(found[:, :150], want[:, :150], atol=1e-5, rtol=1e-4)


def test_rows_are_written_to_their_own_caches(side, device):
    _, write_rows = side_of(side)
    of = caches([10, 40], 64, torch.float32, device)
    before = [keys.clone() for keys, _ in of]
    table = table_of(4, 3, 64, torch.float32, device)
    table.fill([part([9], of[0]), part([2, 39], of[1])])
    keys, values = torch.randn(2, KV_HEADS, 4, 64).to(device)
    write_rows(keys, values, table, 2)
    for (rows, slots), (into, values_into), old in zip(
        [(slice(0, 1), [9]), (slice(1, 3), [2, 39])], of, before, strict=True
    ):
        assert torch.equal(into[2][:, slots], keys[:, rows])
        assert torch.equal(values_into[2][:, slots], values[:, rows])
        others = [slot for slot in range(into.shape[2]) if slot not in slots]
        assert torch.equal(into[2][:, others], old[2][:, others])
        assert torch.equal(into[:2], old[:2])


def test_what_does_not_fit_a_table_is_refused(device):
    (cache,) = caches([40], 64, torch.float32, device)
    table = table_of(2, 3, 64, torch.float32, device)
    with pytest.raises(ValueError, match="3 rows or more in a table of 2"):
        table.fill([part([1, 2, 3], cache)])
    with pytest.raises(ValueError, match="contiguous"):
        table.fill([part([1], [each[:, :, ::2] for each in cache])])
    with pytest.raises(ValueError, match="share a KV head"):
        table_of(2, 200, 64, torch.float32, device)
    with pytest.raises(ValueError, match="table's 2 rows"):
        ragkv_kernels.attend_rows(torch.zeros(6, 3, 64), table, 0, window=None, scaling=1.0)
