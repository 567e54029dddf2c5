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
"""A model's static cache. Compiled steps, CUDA graphs above all, are bound to where it lies."""


def without_copy_repair(config: ReuseConfig, method: Method, decode: DecodeConfig) -> ReuseConfig:
    """Return ``config``; where ``decode`` wants a static cache, without copy repair.

    A step that repairs is a pass over scattered rows, which no compiled step can be.

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


def compiled_how(loaded: LoadedModel, own: CompileConfig | None) -> CompileConfig | None:
    """Return ``own``; where it is None and CUDA graphs would do harm, a way without them.

    None leaves it to transformers. Its layers with a window count rows in numbers of Python's,
    and torch captures a graph for each number: for each step anew.
    """
    windows = isinstance(loaded, ReusableModel) and any(loaded.architecture.windows)
    if own is None and windows and loaded.device.type == "cuda":
        return CompileConfig(mode="default")
    return own


def release(model: PreTrainedModel) -> None:
    """Let go of the model's static cache; the next request that wants one makes another."""
    _kept.pop(model, None)


def static_cache(loaded: LoadedModel, architecture: Architecture, rows: int) -> StaticCache:
    """Return the model's static cache, or a new and larger one where ``rows`` do not fit.

    It has whatever the last request left there. The model's lock must be held.
    """
    if not lock_of(loaded.model).is_mine:
        raise RuntimeError("a static cache is the model's: hold its lock")
    kept = _kept.get(loaded.model)
    if kept is not None and kept.suits(loaded, rows):
        return kept.cache
    del kept
    release(loaded.model)  # before there is another
    room = _room(loaded, rows)
    with torch.inference_mode(mode=False):  # outside of it, too, requests write to it
        cache = StaticCache(config=config_of(loaded.model), max_cache_len=room)
        cache.early_initialization(
            1, architecture.kv_heads, architecture.head_dim, loaded.dtype, loaded.device
        )
    _kept[loaded.model] = _Kept(cache, room, loaded.device, loaded.dtype)
    return cache


def _room(loaded: LoadedModel, rows: int) -> int:
    """Return how many rows to make where so many are wanted: a new shape is compiled anew."""
    asked: int | None = getattr(loaded.model.generation_config, "max_cache_len", None)
    if asked is not None and rows <= asked:
        return asked
    room = max(_LEAST_ROWS, 1 << (rows - 1).bit_length())
    known = loaded.positions
    return room if known is None else max(rows, min(room, known))


def within(loaded: LoadedModel, config: DecodeConfig, tokens: int) -> DecodeConfig:
    """Return ``config``, with no more tokens to draw than a static cache of the model can hold.

    It has rows for all of them from the start, and for positions that the model knows.
    """
    known = loaded.positions
    if config.cache_implementation is None or known is None:
        return config
    return replace(config, max_new_tokens=max(1, min(config.max_new_tokens, known - tokens)))


@contextmanager
def decoded_over(
    loaded: LoadedModel, cache: Cache | None, config: DecodeConfig, tokens: int
) -> Iterator[Cache | None]:
    """Give the cache that transformers' ``generate`` is to have for a prompt of ``tokens``.

    That is ``cache``, unless a static one is wanted. Then generate's first call, which repairs
    and computes the prompt's last token, still runs over ``cache``, whose rows go to the static
    one after it, layer by layer; the steps behind it run over that, and no hook of ragkv's is
    on the model any more. Without a spliced cache the prompt is prefilled into the static one.

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
    """Let the model's next call over ``static`` run over ``spliced``, and move its rows then.

    Compiled code keeps the hooks that were there when it was traced, so these, and those of
    :func:`ragkv.attend.forward.subset_as_first_call`, go with the first call.
    """
    _say_length(static, spliced)

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
        _move(spliced, static)
        out[0].past_key_values = static

    enter = loaded.model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    leave = loaded.model.register_forward_hook(after, with_kwargs=True)
    try:
        yield
    finally:
        enter.remove()
        leave.remove()


def _say_length(static: StaticCache, spliced: SplicedCache) -> None:
    """Give ``static`` the length of ``spliced``, by which ``generate`` knows what to compute.

    It asks the first layer. The rows are none: they are replaced before they are read.
    """
    first = spliced.layers[0]
    rows = torch.ones_like(first.keys[:, :, :1]).expand(-1, -1, first.length, -1)
    _empty(static.layers[0])
    static.update(rows, rows, 0)


def _move(spliced: SplicedCache, static: StaticCache) -> None:
    """Copy the rows of all layers, each as soon as it has arrived."""
    _empty(static)
    length = spliced.get_seq_length()
    for index in range(len(static.layers)):
        keys, values = (rows[None, :, :length] for rows in spliced.layer(index))
        static.update(keys, values, index)


def _empty(cache: Any) -> None:
    """Forget all rows, of a cache or of one layer, where they lie: none is seen by the next."""
    cache.reset()
