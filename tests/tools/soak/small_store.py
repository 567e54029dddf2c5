"""``ragkv serve`` over a store that fills up: python -m soak.small_store BYTES OPTIONS...

The command has no option for it, so its settings are replaced here.
"""

from __future__ import annotations

import sys

import ragkv.config
from ragkv.cli.main import app

MEMORY_BYTES = 64 << 20
PREFIX_BYTES = 64 << 20
"""Caches that are full before their memory is looked at: what grows then is a leak."""

DISK_BYTES = int(sys.argv[1])


class SmallStore(ragkv.config.StoreConfig):
    """Settings of a store with little room, whatever was asked for."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_bytes", MEMORY_BYTES)
        object.__setattr__(self, "prefix_bytes", PREFIX_BYTES)
        object.__setattr__(self, "disk_bytes", DISK_BYTES)
        super().__post_init__()


if __name__ == "__main__":
    ragkv.config.StoreConfig = SmallStore  # type: ignore[misc]
    sys.argv = ["ragkv", "serve", *sys.argv[2:]]
    app()
