"""8 bits a number: half of 16-bit, at no visible loss."""

from __future__ import annotations

from ragkv_kernels import INT8

from ragkv.store.entry.codecs.grid import GridCodec


class Int8(GridCodec):
    """One code a byte."""

    name = "int8"
    grid = INT8
