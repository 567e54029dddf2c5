"""ragkv: reuse the KV caches of retrieved chunks, and repair what matters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragkv.answer.completion import Completion
    from ragkv.config import DecodeConfig, ReuseConfig, SparseDecoding, StoreConfig
    from ragkv.engine.engine import RagKV
    from ragkv.engine.stream import CompletionStream, Prefilled
    from ragkv.prompt.chat import Chat
    from ragkv.prompt.tools.calls import ToolCall
    from ragkv.report.account import PrecomputeReport, ReuseReport
    from ragkv.select.method import Method

_HOMES = {
    "Chat": "ragkv.prompt.chat",
    "Completion": "ragkv.answer.completion",
    "CompletionStream": "ragkv.engine.stream",
    "DecodeConfig": "ragkv.config.decode",
    "SparseDecoding": "ragkv.config.decode",
    "Method": "ragkv.select.method",
    "PrecomputeReport": "ragkv.report.account",
    "Prefilled": "ragkv.engine.stream",
    "RagKV": "ragkv.engine.engine",
    "ReuseConfig": "ragkv.config.reuse",
    "ReuseReport": "ragkv.report.account",
    "StoreConfig": "ragkv.config.store",
    "ToolCall": "ragkv.prompt.tools.calls",
}

__all__ = [
    "Chat",
    "Completion",
    "CompletionStream",
    "DecodeConfig",
    "Method",
    "PrecomputeReport",
    "Prefilled",
    "RagKV",
    "ReuseConfig",
    "ReuseReport",
    "SparseDecoding",
    "StoreConfig",
    "ToolCall",
]


def __getattr__(name: str) -> object:
    """Load a public name, and torch with it, on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ragkv' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
