"""Measure the kernels on this GPU: ``python -m ragkv_kernels.bench [--json PATH]``.

For each model's shapes: attention of the recomputed rows by the kernel, beside torch's own
for the same rows with a mask, and beside torch's causal attention of all rows times the share
of the area; then moving, restoring and encoding one layer beside the bytes that they must move.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ragkv_kernels.dispatch import attend, encode, move, paid, restore, runs_attend
from ragkv_kernels.grid import INT4, INT8, Grid

SHAPES = {"Qwen2.5-7B": (28, 4, 128), "Qwen2.5-14B": (40, 8, 128), "Llama-3-8B": (32, 8, 128)}
"""Query heads, KV heads and head size."""

QUERY_ROWS = 64
"""The last rows, which are always computed, and whose attention selection sums up."""

Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of the table; times are medians in milliseconds."""

    model: str
    tokens: int
    operation: str
    ms: float
    rate: float
    """TFLOP/s of the visible area for attention, GB/s of read and written bytes for the others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="ragkv_kernels.bench", description=__doc__)
    parser.add_argument("--tokens", default="8192,16384,32768", help="keys, comma-separated")
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the rows computed")
    parser.add_argument("--models", default=",".join(SHAPES), help="of: " + ", ".join(SHAPES))
    parser.add_argument("--json", type=Path, help="write the table here, too")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("This measures kernels on a GPU, and torch sees none here.\n")
        return 2
    if not runs_attend(torch.empty(1, 1, 128, dtype=torch.bfloat16, device="cuda")):
        sys.stderr.write("The kernels do not run on this GPU; see the line above.\n")
        return 2
    device = torch.cuda.get_device_name()
    sys.stdout.write(f"{device}, torch {torch.__version__}, bfloat16, ratio {asked.ratio}\n")
    sys.stdout.write(f"{'model':14}{'tokens':>8}  {'operation':28}{'ms':>10}{'rate':>16}\n")
    rows = []
    for model in asked.models.split(","):
        for tokens in map(int, asked.tokens.split(",")):
            for row in _attention(model, tokens, asked.ratio) + _codes(model, tokens):
                unit = "TFLOP/s" if row.operation.startswith("att") else "GB/s"
                sys.stdout.write(
                    f"{row.model:14}{row.tokens:8}  {row.operation:28}"
                    f"{row.ms:10.3f}{row.rate:9.1f} {unit}\n"
                )
                rows.append(row)
    if asked.json:
        table = {"device": device, "ratio": asked.ratio, "rows": [asdict(row) for row in rows]}
        asked.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


def _attention(model: str, tokens: int, ratio: float) -> list[Row]:
    heads, kv_heads, width = SHAPES[model]
    torch.manual_seed(0)
    chosen = torch.randperm(tokens - QUERY_ROWS)[: max(0, int(tokens * ratio) - QUERY_ROWS)]
    last = torch.arange(tokens - QUERY_ROWS, tokens)
    positions = torch.cat([chosen, last]).sort().values.cuda()
    query, key, value = (
        torch.randn(count, size, width, dtype=torch.bfloat16, device="cuda")
        for count, size in ((heads, len(positions)), (kv_heads, tokens), (kv_heads, tokens))
    )
    scaling = width**-0.5
    seen = int(positions.sum()) + len(positions)
    share = seen / (tokens * (tokens + 1) / 2)
    work = 4 * heads * width * seen

    def ours(watch: int = 0) -> object:
        return attend(query, key, value, positions, window=None, scaling=scaling, watch=watch)

    # torch's attention with a mask and shared heads falls back to the slow path that writes
    # the scores: repeat the heads before the clock starts, in its favour
    wide_key, wide_value = (
        part.repeat_interleave(heads // kv_heads, 0)[None] for part in (key, value)
    )
    hidden = torch.arange(tokens, device="cuda") > positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device="cuda")
    mask.masked_fill_(hidden, float("-inf"))

    def masked() -> object:
        return functional.scaled_dot_product_attention(
            query[None], wide_key, wide_value, attn_mask=mask, scale=scaling
        )

    everyone = torch.randn(1, heads, tokens, width, dtype=torch.bfloat16, device="cuda")

    def causal() -> object:
        return functional.scaled_dot_product_attention(
            everyone, wide_key, wide_value, is_causal=True, scale=scaling
        )

    one = query[:, -1:], positions[-1:]

    def single() -> object:
        return attend(one[0], key, value, one[1], window=None, scaling=scaling)

    last, where = query[:, -QUERY_ROWS:], positions[-QUERY_ROWS:]
    lse = attend(last, key, value, where, window=None, scaling=scaling, lse=True).lse

    def pays() -> object:
        assert lse is not None  # noqa: S101  asked for above
        return paid(last, key, where, lse, window=None, scaling=scaling)

    times = [
        ("attend", _median(ours), work),
        (f"attend, watching {QUERY_ROWS} rows", _median(lambda: ours(QUERY_ROWS)), work),
        (
            f"attention paid by {QUERY_ROWS} rows",
            _median(pays),
            2 * heads * width * int(where.sum()),
        ),
        ("attend, torch with a mask", _median(masked), work),
        ("attend, torch causal x share", _median(causal) * share, work),
        ("attend, one row", _median(single), 4 * heads * width * tokens),
    ]
    return [Row(model, tokens, name, ms, flops / ms / 1e9) for name, ms, flops in times]


def _codes(model: str, tokens: int) -> list[Row]:
    _, kv_heads, width = SHAPES[model]
    keys, values = torch.randn(2, kv_heads, tokens, width, dtype=torch.bfloat16, device="cuda")
    angles = torch.rand(tokens, width // 2, device="cuda")
    table = angles.cos(), angles.sin()
    slots = torch.arange(tokens, device="cuda")
    plain = 2 * keys.nbytes
    moves: dict[str, Any] = {"rows": slots, "slots": slots, "table": table}
    buffer = torch.empty(2, 1, *keys.shape, dtype=keys.dtype, device="cuda")
    cached = keys[None], values[None]
    ms = _median(lambda: move(cached, buffer[0], buffer[1], **moves))
    found = [("move", ms, 2 * plain)]
    for name, grid in {"int8": INT8, "int4": INT4}.items():
        ms = _median(partial(encode, keys, values, table, grid=grid))
        made = encode(keys, values, table, grid=grid).data
        data = made.new_empty(1, -(-len(made) // 16) * 16)[:, : len(made)]  # as layers lie
        data.copy_(made)
        found.append((f"encode {name}", ms, plain + data.nbytes))

        def back(data: torch.Tensor = data, grid: Grid = grid) -> None:
            restore(data, tokens, buffer[0], buffer[1], grid=grid, **moves)

        found.append((f"restore {name}", _median(back), plain + data.nbytes))
    return [Row(model, tokens, name, ms, moved / ms / 1e6) for name, ms, moved in found]


def _median(run: Run) -> float:
    """Return the median time in milliseconds; the second-level cache is emptied in between."""
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median"))


if __name__ == "__main__":
    sys.exit(main())
