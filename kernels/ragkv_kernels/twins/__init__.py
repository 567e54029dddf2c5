"""The operations in plain torch, on any device."""

from ragkv_kernels.twins.attend import attend, paid
from ragkv_kernels.twins.drift import drift
from ragkv_kernels.twins.encode import encode
from ragkv_kernels.twins.restore import decode, place, restore
from ragkv_kernels.twins.rows import attend_rows, paid_rows, write_rows

__all__ = [
    "attend",
    "attend_rows",
    "decode",
    "drift",
    "encode",
    "paid",
    "paid_rows",
    "place",
    "restore",
    "write_rows",
]
