"""Settings of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ragkv.config.checks import check_bool, check_choice, check_number
from ragkv.errors import ConfigError

MEMORY = ":memory:"
"""Location of a store without files."""

CODECS = ("raw", "int8", "int4")
"""Encodings of entries, described in docs/store-format.md."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Settings of the store: its place, budgets and codec.

    Parameters
    ----------
    path
        Folder of the store, or ``":memory:"``. ``None`` is the user's cache folder.
    memory_bytes
        Budget of the memory tier in front of the disk, in bytes. ``None`` is an eighth of the
        memory.
    disk_bytes
        Budget of each namespace's folder, in bytes. Beyond it, chunks that are cheap to compute and
        rarely requested are evicted. ``None`` means no limit.
    device_bytes
        Budget of the tier on the model's device, in bytes. ``None`` is 1/8 of a GPU's free memory;
        a model on the CPU has no such tier.
    read_only
        Serve from the store without writing to it.
    codec
        Encoding of entries: ``raw`` is lossless; ``int8`` and ``int4`` take a half and a quarter of
        the space of 16-bit numbers. Entries of a different codec are not used.
    history_bytes
        Budget for rows of earlier prompts and answers, in bytes of the host's memory; prompts that
        begin with the same tokens reuse them. ``None`` is an eighth of the memory, 0 keeps none.
    """

    path: str | Path | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    read_only: bool = False
    device_bytes: int | None = None
    codec: str = "raw"
    history_bytes: int | None = None

    def __post_init__(self) -> None:
        wrong = self.path is not None and not isinstance(self.path, str | Path)
        if wrong or "\0" in str(self.path):
            raise ConfigError(f"store path must be a folder or ':memory:', not {self.path!r}")
        for name in ("memory_bytes", "disk_bytes", "device_bytes", "history_bytes"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), int(name == "disk_bytes"), 2**60)
        check_bool("read_only", self.read_only)
        check_choice("codec", self.codec, CODECS)
        if str(self.path) == MEMORY and self.codec != "raw":
            raise ConfigError(
                f"codec {self.codec} with {MEMORY}: entries in memory are not encoded; give a "
                "folder or a server, or omit the codec"
            )


STORE_SETTINGS = tuple(each.name for each in fields(StoreConfig) if each.name != "path")
"""Fields besides ``path``, which is the argument ``store`` elsewhere."""


def with_store(given: Mapping[str, Any]) -> dict[str, Any]:
    """Move fields of StoreConfig in keyword arguments into ``store``."""
    own = {name: given[name] for name in STORE_SETTINGS if given.get(name) is not None}
    rest = {name: value for name, value in given.items() if name not in STORE_SETTINGS}
    if own:
        store = rest.get("store")
        store = store if isinstance(store, StoreConfig) else StoreConfig(store)
        rest["store"] = replace(store, **own)
    return rest
