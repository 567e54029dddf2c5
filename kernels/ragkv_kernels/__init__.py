"""Fast paths of single operations: Triton on a GPU, a torch twin of the same signature elsewhere.

One file an operation in ``gpu/``, its twin in ``twins/``; ``dispatch.py`` picks. Nothing here
imports ragkv, and nothing imports Triton before a GPU asks for it.
"""

from ragkv_kernels.dispatch import (
    attend,
    decode,
    encode,
    move,
    paid,
    restore,
    runs_attend,
)
from ragkv_kernels.grid import INT4, INT8, Encoded, Grid

__all__ = [
    "INT4",
    "INT8",
    "Encoded",
    "Grid",
    "attend",
    "decode",
    "encode",
    "move",
    "paid",
    "restore",
    "runs_attend",
]
