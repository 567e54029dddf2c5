"""Length: needles and copies in prompts of 4K tokens and more."""

from __future__ import annotations

from collections.abc import Sequence

from ragkv.errors import ConfigError
from ragkv_bench.data.needles import Hide, needle
from ragkv_bench.probes import copies

LENGTHS = (4096, 8192, 16384, 32768)
KINDS: dict[str, Hide] = {"needle": needle("multikey"), **copies.KINDS}


def within(positions: int | None, lengths: Sequence[int], model: str) -> tuple[int, ...]:
    """Return lengths that a model has positions for: all of those given, some of ``LENGTHS``.

    Raises ConfigError: it has fewer than one that is given, or than the least.
    """
    if positions is None:
        return tuple(lengths) or LENGTHS
    for length in lengths or LENGTHS[:1]:
        if length > positions:
            raise ConfigError(f"{model} has {positions} positions, not {length}")
    return tuple(length for length in lengths or LENGTHS if length <= positions)
