"""Decode over a cache of fixed shape, whose steps transformers compiles: CUDA graphs on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticCache

from ragkv.config import DecodeConfig, ReuseConfig
from ragkv.errors import ConfigError
from ragkv.model.architecture import Architecture, config_of
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.model.lock import lock_of
from ragkv.select import Method
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.overlap import OverlappedCache

_LEAST_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Kept:
    cache: StaticCache
    rows: int
    device: torch.device
    dtype: torch.dtype

    def suits(self, loaded: LoadedModel, rows: int) -> bool:
        return (self.device, self.dtype) == (loaded.device, loaded.dtype) and rows <= self.rows


_kept: weakref.WeakKeyDictionary[PreTrainedModel, _Kept] = weakref.WeakKeyDictionary()
"""A model's static cache. Compiled steps, CUDA graphs above all, are bound to its address."""


def without_copy_repair(config: ReuseConfig, method: Method, decode: DecodeConfig) -> ReuseConfig:
    """Return ``config``, without copy repair if ``decode`` uses a static cache.

    A step that repairs is a pass over scattered rows, and cannot be compiled.

    Raises
    ------
    ConfigError
        The method's chunks overlap, which rows of a static cache cannot.
    """
    if decode.cache_implementation is None:
        return config
    if method.parallel is not None:
        raise ConfigError(
            f"{method.name} decodes over chunks that overlap, which a static cache cannot hold: "
            "leave cache_implementation out"
        )
    return config.override(repair_ahead=False)


def compile_config_for(loaded: LoadedModel, own: CompileConfig | None) -> CompileConfig | None:
    """Return ``own``, or a configuration without CUDA graphs where these would be harmful.

    None is transformers' choice. Its layers with a window count rows in Python integers, and
    torch would capture a graph for each of them: a new one every step.
    """
    windows = isinstance(loaded, ReusableModel) and any(loaded.architecture.windows)
    if own is None and windows and loaded.device.type == "cuda":
        return CompileConfig(mode="default")
    return own


def release(model: PreTrainedModel) -> None:
    """Drop the model's static cache; the next request that needs one makes another."""
    _kept.pop(model, None)


def static_cache(loaded: LoadedModel, architecture: Architecture, rows: int) -> StaticCache:
    """Return the model's static cache, or a new and larger one where ``rows`` do not fit.

    It contains the last request's rows. The model's lock must be held.
    """
    if not lock_of(loaded.model).is_mine:
        raise RuntimeError("a static cache is the model's: hold its lock")
    kept = _kept.get(loaded.model)
    if kept is not None and kept.suits(loaded, rows):
        return kept.cache
    del kept
    release(loaded.model)  # before another is allocated
    room = _room(loaded, rows)
    with torch.inference_mode(mode=False):  # requests write to it outside of inference mode, too
        cache = StaticCache(config=config_of(loaded.model), max_cache_len=room)
        cache.early_initialization(
            1, architecture.kv_heads, architecture.head_dim, loaded.dtype, loaded.device
        )
    _kept[loaded.model] = _Kept(cache, room, loaded.device, loaded.dtype)
    return cache


def _room(loaded: LoadedModel, rows: int) -> int:
    """Return the number of rows to allocate for ``rows``: every new shape is compiled again."""
    asked: int | None = getattr(loaded.model.generation_config, "max_cache_len", None)
    if asked is not None and rows <= asked:
        return asked
    room = max(_LEAST_ROWS, 1 << (rows - 1).bit_length())
    known = loaded.positions
    return room if known is None else max(rows, min(room, known))


def limit_to_positions(loaded: LoadedModel, config: DecodeConfig, tokens: int) -> DecodeConfig:
    """Return ``config`` with ``max_new_tokens`` limited to the model's positions.

    A static cache has rows for all of them from the start. Others grow, and stay as they are.
    """
    known = loaded.positions
    if config.cache_implementation is None or known is None:
        return config
    return replace(config, max_new_tokens=max(1, min(config.max_new_tokens, known - tokens)))


@contextmanager
def decoding_cache(
    loaded: LoadedModel, cache: Cache | None, config: DecodeConfig, tokens: int
) -> Iterator[Cache | None]:
    """Yield the cache for transformers' ``generate`` over a prompt of ``tokens``.

    That is ``cache``, unless the request uses a static one. Then generate's first call, which
    repairs and computes the prompt's last token, still runs over ``cache``, whose rows are then
    copied to the static one, layer by layer; later steps run over that, without any of ragkv's
    hooks. Without a spliced cache the prompt is prefilled into the static one.

    Raises
    ------
    RuntimeError
        The model's lock is not held, or chunks overlap in ``cache``.
    """
    if config.cache_implementation is None or not isinstance(loaded, ReusableModel):
        yield cache
        return
    if isinstance(cache, OverlappedCache):
        raise RuntimeError("a static cache cannot hold chunks that overlap")
    static = static_cache(loaded, loaded.architecture, tokens + config.max_new_tokens)
    if not isinstance(cache, SplicedCache):
        _empty(static)
        yield static
        return
    with _first_call_over(loaded, cache, static):
        yield static


@contextmanager
def _first_call_over(
    loaded: LoadedModel, spliced: SplicedCache, static: StaticCache
) -> Iterator[None]:
    """Run the model's next call over ``static`` over ``spliced`` instead, then copy its rows.

    Compiled code keeps the hooks of the time when it was traced, so these, and those of
    :func:`ragkv.attend.forward.subset_as_first_call`, are removed by the first call.
    """
    _set_length(static, spliced)

    def is_over(given: object, cache: Cache) -> bool:
        return isinstance(given, dict) and given.get("past_key_values") is cache

    def before(
        _: object, args: tuple[Any, ...], given: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if given is None or not is_over(given, static):
            return None
        enter.remove()
        return args, {**given, "past_key_values": spliced, "attention_mask": None}

    def after(_: object, __: object, given: object, *out: Any) -> None:
        if not out or not is_over(given, spliced):
            return
        leave.remove()
        _copy(spliced, static)
        out[0].past_key_values = static

    enter = loaded.model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    leave = loaded.model.register_forward_hook(after, with_kwargs=True)
    try:
        yield
    finally:
        enter.remove()
        leave.remove()


def _set_length(static: StaticCache, spliced: SplicedCache) -> None:
    """Give ``static`` the length of ``spliced``, from which ``generate`` derives what to compute.

    It reads the first layer's length. The rows written here are replaced before they are read.
    """
    first = spliced.layers[0]
    rows = torch.ones_like(first.keys[:, :, :1]).expand(-1, -1, first.length, -1)
    _empty(static.layers[0])
    static.update(rows, rows, 0)


def _copy(spliced: SplicedCache, static: StaticCache) -> None:
    """Copy the rows of all layers, each as soon as it is loaded."""
    _empty(static)
    length = spliced.get_seq_length()
    for index in range(len(static.layers)):
        keys, values = (rows[None, :, :length] for rows in spliced.layer(index))
        static.update(keys, values, index)


def _empty(cache: Any) -> None:
    """Reset a cache or one layer in place: later rows do not see earlier ones."""
    cache.reset()
