"""The operations in plain torch, on any device."""

from ragkv_kernels.twins.attend import attend, paid
from ragkv_kernels.twins.encode import encode
from ragkv_kernels.twins.restore import decode, move, restore
from ragkv_kernels.twins.rows import attend_rows, write_rows

__all__ = [
    "attend",
    "attend_rows",
    "decode",
    "encode",
    "move",
    "paid",
    "restore",
    "write_rows",
]
