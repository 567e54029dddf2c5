"""The operations in plain torch, on any device."""

from ragkv_kernels.twins.attend import attend, paid
from ragkv_kernels.twins.encode import encode
from ragkv_kernels.twins.restore import decode, move, restore

__all__ = ["attend", "decode", "encode", "move", "paid", "restore"]
