"""Attention of scattered rows against a dense softmax written out in numpy."""

import numpy as np
import pytest
import torch
from ragkv_kernels import twins

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def dense(query, key, value, positions, window, scaling):
    """Row by row in float64: nothing shared with the tested code."""
    query, key, value = (part.double().cpu().numpy() for part in (query, key, value))
    heads, rows, _ = query.shape
    group = heads // key.shape[0]
    out, lse = np.zeros_like(query), np.zeros((heads, rows))
    weights = np.zeros((heads, rows, key.shape[1]))
    for h in range(heads):
        for i, position in enumerate(positions):
            first = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(first, position + 1)
            scores = key[h // group, seen] @ query[h, i] * scaling
            lse[h, i] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
            weights[h, i, seen] = np.exp(scores - lse[h, i])
            out[h, i] = weights[h, i] @ value[h // group]
    return out, lse, weights


def draw(heads, kv_heads, rows, tokens, width, dtype, device):
    torch.manual_seed(heads * 1000 + rows)
    query = 2 * torch.randn(heads, rows, width)
    key, value = torch.randn(2, kv_heads, tokens, width)
    return [part.to(device, dtype) for part in (query, key, value)]


def scattered(rows: int, tokens: int) -> list[int]:
    torch.manual_seed(rows + tokens)
    return sorted(torch.randperm(tokens)[:rows].tolist())


def attend_of(side):
    if side == "twin":
        return twins.attend
    from ragkv_kernels.gpu.attend import attend

    def whole(*args, **kwargs):
        return attend(*args, splits=1, **kwargs)

    return whole


def check(attend, tensors, positions, window, limit=None):
    query, key, value = tensors
    scaling = query.shape[-1] ** -0.5
    rows = torch.tensor(positions, dtype=torch.long, device=query.device)
    ours, mass = attend(query, key, value, rows, window=window, scaling=scaling)
    out, lse, _ = dense(query, key, value, positions, window, scaling)
    limit = limit or TOLERANCE[query.dtype]
    assert ours.dtype == query.dtype
    np.testing.assert_allclose(ours.double().cpu(), out, atol=limit, rtol=limit)
    np.testing.assert_allclose(mass.cpu(), lse, atol=2e-5, rtol=2e-5)


POSITIONS = {
    "first": [0],
    "last": [149],
    "block-end": [63],
    "block-start": [64],
    "window-at-block-start": [134],
    "edges": [0, 63, 64, 65, 127, 128, 129, 149],
    "scattered": scattered(40, 150),
    "tail": list(range(110, 150)),
}


@pytest.mark.parametrize("window", [None, 1, 5, 70, 1000])
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_rows_see_exactly_their_keys(side, device, positions, window):
    tensors = draw(4, 2, len(positions), 150, 64, torch.float32, device)
    check(attend_of(side), tensors, positions, window)


@pytest.mark.parametrize("window", [None, 50])
def test_all_rows(side, device, window):
    positions = list(range(130))
    check(attend_of(side), draw(2, 1, 130, 130, 64, torch.float32, device), positions, window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (7, 1), (16, 2)])
def test_heads_of_a_group_share_keys(side, device, heads, kv_heads):
    positions = scattered(25, 100)
    tensors = draw(heads, kv_heads, 25, 100, 64, torch.float32, device)
    check(attend_of(side), tensors, positions, None)
    check(attend_of(side), tensors, positions, 20)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 256])
def test_head_sizes_and_dtypes(side, device, width, dtype):
    positions = scattered(20, 90)
    check(attend_of(side), draw(4, 2, 20, 90, width, dtype, device), positions, None)
    check(attend_of(side), draw(4, 2, 20, 90, width, dtype, device), positions, 33)


def test_any_strides(side, device):
    positions = scattered(20, 90)
    query, key, value = draw(4, 2, 20, 90, 64, torch.float32, device)
    query = query.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    key = key.transpose(0, 1).contiguous().transpose(0, 1)
    value = torch.cat([value, value], dim=2)[:, :, 64:]
    wide = torch.zeros(2, 200, 64, device=device)
    wide[:, :90] = value
    check(attend_of(side), (query, key, wide[:, :90]), positions, 40)
    check(attend_of(side), (query, key, value), positions, None)


def test_no_rows(side, device):
    query, key, value = draw(4, 2, 0, 90, 64, torch.float32, device)
    none = torch.empty(0, dtype=torch.long, device=device)
    out, lse = attend_of(side)(query, key, value, none, window=None, scaling=1.0)
    assert (out.shape, lse.shape) == ((4, 0, 64), (4, 0))


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("window", [None, 100])
def test_programs_share_the_keys_of_few_rows(device, splits, window):
    from ragkv_kernels.gpu.attend import attend

    def shared(*args, **kwargs):
        return attend(*args, splits=splits, **kwargs)

    # row 3 sees nothing of the later shares, the window leaves row 299 nothing of the first
    positions = [3, 64, 150, 299]
    check(shared, draw(7, 1, 4, 300, 64, torch.float32, device), positions, window)
    check(shared, draw(4, 2, 4, 300, 80, torch.bfloat16, device), positions, window)


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "tokens", "width", "dtype"),
    [
        (4, 2, 40, 150, 64, torch.float32),
        (7, 1, 150, 300, 64, torch.float32),  # more rows than a tile has
        (3, 3, 1, 90, 80, torch.float32),
        (6, 2, 33, 150, 128, torch.bfloat16),
    ],
    ids=str,
)
def test_what_the_last_row_and_any_row_pay(
    side, device, heads, kv_heads, rows, tokens, width, dtype, window
):
    positions = scattered(rows, tokens)
    query, key, value = draw(heads, kv_heads, rows, tokens, width, dtype, device)
    _, lse, weights = dense(query, key, value, positions, window, 0.125)
    paid = twins.paid
    if side == "triton":
        from ragkv_kernels.gpu.paid import paid
    ours = paid(
        query,
        key,
        torch.tensor(positions, device=device),
        torch.tensor(lse, dtype=torch.float32, device=device),
        window=window,
        scaling=0.125,
    ).cpu()
    limit = TOLERANCE[dtype]
    np.testing.assert_allclose(ours[0], weights[:, -1].mean(0), atol=limit, rtol=limit)
    np.testing.assert_allclose(ours[1], weights.max(1).mean(0), atol=limit, rtol=limit)


def test_large_scores_do_not_overflow(side, device):
    query, key, value = draw(4, 2, 20, 90, 64, torch.float32, device)
    # scores of some hundreds, whose float32 leaves four digits after the point
    check(attend_of(side), (30 * query, key, value), scattered(20, 90), None, limit=1e-3)
