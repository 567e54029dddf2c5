"""Predicted shifts against plain loops in float64."""

import pytest
import torch
from ragkv_kernels import Stretches, twins

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 5e-2}
HEADS, END, ROWS, EARLIER = 2, 150, 30, 6


def side_of(side):
    if side == "twin":
        return twins.drift
    from ragkv_kernels.gpu.drift import drift

    return drift


def stretches_of(device, earlier):
    """Two stretches of different length; some observed rows are an earlier prompt's."""
    torch.manual_seed(3)
    positions = torch.tensor([12, 14, 30, 31, 33, 90, 101, 102])
    sources = torch.tensor([4, 5, -3 if earlier else 6, 7, 9, 20, -1 if earlier else 21, 25])
    counts = torch.tensor([5, 3])
    weights = torch.rand(2, 70, 5) * (torch.arange(5) < counts[:, None])[:, None]
    fixed = torch.zeros(END, dtype=torch.bool)
    fixed[20:25] = True
    numbers = (torch.tensor([10, 80]), torch.tensor([25, 70]), positions, sources)
    parts = weights, torch.tensor([0, 5]), counts, *numbers, torch.rand(8) + 0.5, fixed
    return Stretches(*(part.to(device) for part in parts))


def turned(row, cos, sin, adjacent):
    row, half = row.clone(), len(cos)
    a, b = slice(half), slice(half, 2 * half)
    if adjacent:
        a, b = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    first, second = row[a].clone(), row[b].clone()
    row[a], row[b] = first * cos - second * sin, second * cos + first * sin
    return row


def by_loops(rows, fresh, earlier, of, table, adjacent):
    rows = [part.double().cpu().clone() for part in rows]
    fresh = [part.double().cpu() for part in fresh]
    earlier = earlier and [part.double().cpu() for part in earlier]
    of = Stretches(*(part.cpu() for part in of))
    cos, sin = (part.double().cpu() for part in table)
    before = [part.clone() for part in rows]
    for index, part in enumerate(rows):
        moved = []
        for at, source in zip(of.positions.tolist(), of.sources.tolist(), strict=True):
            shift = (
                earlier[index][:, ~source]
                if source < 0
                else (fresh[index][:, source] - before[index][:, at])
            )
            if index == 0:
                scale = cos[at] ** 2 + sin[at] ** 2
                shift = torch.stack(
                    [turned(row, cos[at] / scale, -sin[at] / scale, adjacent) for row in shift]
                )
            moved.append(shift)
        lengths = torch.stack([each.norm() for each in moved]) / of.sizes.double()
        median = lengths.sort().values[(len(lengths) - 1) // 2]
        moved = [each * min(1, median / size) for each, size in zip(moved, lengths, strict=True)]
        for stretch, (start, length) in enumerate(
            zip(of.starts.tolist(), of.lengths.tolist(), strict=True)
        ):
            for place in range(length):
                if of.fixed[start + place]:
                    continue
                for number in range(int(of.counts[stretch])):
                    weight = of.weights[stretch, place, number]
                    shift = moved[int(of.firsts[stretch]) + number]
                    if index == 0:
                        at = start + place
                        shift = torch.stack(
                            [turned(row, cos[at], sin[at], adjacent) for row in shift]
                        )
                    part[:, start + place] += weight.double() * shift
    return rows


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("width", "rotary", "adjacent", "earlier"),
    [(64, 64, False, False), (80, 80, False, True), (64, 32, True, True), (64, 16, False, False)],
    ids=["halves", "padded", "adjacent", "partial"],
)
def test_rows_move_as_their_stretch_lets_expect(
    side, device, width, rotary, adjacent, earlier, dtype
):
    torch.manual_seed(width + rotary)
    rows = torch.randn(2, HEADS, END + 9, width).to(device, dtype)[:, :, :END].unbind()
    fresh = [torch.randn(ROWS, HEADS, width).transpose(0, 1).to(device, dtype) for _ in range(2)]
    known = torch.randn(2, HEADS, EARLIER, width).to(device, dtype).unbind() if earlier else None
    table = 1.2 * torch.rand(2, END, rotary // 2).to(device) - 0.2
    of = stretches_of(device, earlier)
    expected = by_loops(rows, fresh, known, of, table, adjacent)
    side_of(side)(rows, fresh, known, of, table=tuple(table), adjacent=adjacent)
    for part, want in zip(rows, expected, strict=True):
        scale = float(want.abs().max())
        torch.testing.assert_close(
            part.double().cpu(), want, atol=TOLERANCE[dtype] * scale / 10, rtol=TOLERANCE[dtype]
        )
