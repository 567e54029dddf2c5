"""Decoding over chunks that overlap (APE, arXiv 2502.05431)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from transformers.cache_utils import Cache

from ragkv.attend.attention import Pass, subset_attention
from ragkv.attend.rows import Rows
from ragkv.errors import ConfigError
from ragkv.model.architecture import backbone_of
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.splice.overlap import OverlappedCache

_TAKEN = (
    "The model decodes over chunks that overlap: leave `with prefilled.decoding():` before it "
    "runs on anything else."
)


@contextmanager
def overlapping(loaded: LoadedModel, cache: Cache | None) -> Iterator[None]:
    """Make the model's passes over the cache in the block attend to overlapping chunks.

    Nothing happens for a cache without overlap. Otherwise rows appended to it get the positions
    of its overlap, whatever ``position_ids`` the call has. Subset passes, and other threads'
    passes over other caches, are unchanged.

    Raises
    ------
    RuntimeError
        From a pass without this cache inside the block, in the same thread.
    ConfigError
        The model's generation configuration has ``guidance_scale``, which makes such passes.
    """
    if not isinstance(cache, OverlappedCache) or not isinstance(loaded, ReusableModel):
        yield
        return
    if getattr(loaded.model.generation_config, "guidance_scale", None) not in (None, 1):
        raise ConfigError(
            "the model's generation configuration has guidance_scale, with which chunks cannot "
            "overlap: set it to None, or use another method"
        )
    ours, windows = cache, loaded.architecture.windows
    backbone, here = backbone_of(loaded.model), threading.get_ident()

    def before(
        _: object, args: tuple[Any, ...], given: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if given is None or "ragkv_pass" in given:
            return None
        if given.get("past_key_values") is not ours:
            if threading.get_ident() != here:
                return None
            raise RuntimeError(_TAKEN)
        fresh = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        length = ours.get_seq_length()
        rows = Rows.on(fresh.device, np.arange(length, length + fresh.shape[1]))
        return args, {
            **given,
            "attention_mask": None,
            "position_ids": ours.overlap.at(rows.positions)[None],
            "ragkv_pass": Pass(rows, windows, overlap=ours.overlap),
        }

    hook = backbone.register_forward_pre_hook(before, with_kwargs=True)
    ours.open = True
    try:
        with subset_attention(loaded.model):
            yield
    finally:
        ours.open = False
        hook.remove()
