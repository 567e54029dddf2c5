"""Fast paths of single operations: Triton on a GPU, a torch twin of the same signature elsewhere.

One file an operation in ``gpu/``, its twin in ``twins/``; ``dispatch.py`` picks. Nothing here
imports ragkv, and Triton is imported only for a GPU.
"""

from ragkv_kernels.by_table import attend_rows, paid_rows, write_rows
from ragkv_kernels.dispatch import (
    attend,
    decode,
    drift,
    encode,
    paid,
    place,
    restore,
    runs_attend,
)
from ragkv_kernels.grid import INT4, INT8, Encoded, Grid
from ragkv_kernels.row_table import CacheRows, RowTable
from ragkv_kernels.stretches import Stretches

__all__ = [
    "INT4",
    "INT8",
    "CacheRows",
    "Encoded",
    "Grid",
    "RowTable",
    "Stretches",
    "attend",
    "attend_rows",
    "decode",
    "drift",
    "encode",
    "paid",
    "paid_rows",
    "place",
    "restore",
    "runs_attend",
    "write_rows",
]
