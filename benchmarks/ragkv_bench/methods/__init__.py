"""Baselines of 2026 as Methods: ``ragkv eval`` takes them by these names."""

from __future__ import annotations

from ragkv.select import Method
from ragkv_bench.methods import agentkvshift, prophetkv

BASELINES = {each.name: each for each in (prophetkv.METHOD, agentkvshift.METHOD)}


def named(name: str) -> str | Method:
    """Return the baseline of that name; other names are ragkv's own."""
    return BASELINES.get(name, name)
