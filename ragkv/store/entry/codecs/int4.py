"""4 bits a number: a quarter of 16-bit."""

from __future__ import annotations

from ragkv_kernels import INT4

from ragkv.store.entry.codecs.grid import GridCodec


class Int4(GridCodec):
    """Two codes a byte: the first half of them in the low bits, the second in the high."""

    name = "int4"
    grid = INT4
