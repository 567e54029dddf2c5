"""The engine of ``llm=`` or ``kv=``, and its bound settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from langchain_core.runnables.base import RunnableBindingBase

from langchain_ragkv.model import ChunkReuse, check_engine
from ragkv import ReuseConfig
from ragkv.answer.engine import Engine
from ragkv.errors import ConfigError


def engine_of(llm: Any, kv: Engine | None) -> tuple[Engine | ChunkReuse, dict[str, Any]]:
    """Return the precomputing object (``llm`` or ``kv``) and its bound settings.

    ``llm`` can be wrapped in ``llm.bind(...)``, ``llm.with_config(...)`` and the like; the settings
    are the bound fields of :class:`ragkv.ReuseConfig`.

    Raises
    ------
    ConfigError
        Neither or both are given, or there is no such model in ``llm``.
    """
    check_engine(kv)
    if (llm is None) == (kv is None):
        raise ConfigError("give either llm=... or kv=...")
    if kv is not None:
        return kv, {}
    inner, bound = llm, dict[str, Any]()
    while isinstance(inner, RunnableBindingBase):
        bound = {**inner.kwargs, **bound}
        inner = inner.bound
    if not isinstance(inner, ChunkReuse):
        raise ConfigError(
            f"llm must be the ChatRagKV or RagKVLLM that will answer, not {type(inner).__name__}"
        )
    reuse = {field.name for field in fields(ReuseConfig)}
    return inner, {name: bound[name] for name in bound if name in reuse}
