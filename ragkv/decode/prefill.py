"""Ordinary full prefill: the reference, and the fallback."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from transformers.cache_utils import Cache

from ragkv.attend.forward import SubsetPass, subset_forward
from ragkv.errors import UnsupportedModelError
from ragkv.model.calls import cache_argument, cache_in, require_used
from ragkv.model.linear import fast_linear_layers, in_float32
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.prompt.tokens import IntArray
from ragkv.splice.buffer import SplicedCache

PIECE, PIECE_CPU = 8192, 1024
"""Tokens of a long prompt that are computed together."""


@torch.no_grad()
def full_prefill(
    loaded: LoadedModel, ids: IntArray, into: Cache | None = None
) -> tuple[torch.Tensor, Cache]:
    """Prefill ``ids`` ``[tokens]`` as transformers does, with the products of a pass.

    Parameters
    ----------
    into
        An empty cache; None lets the model make its own.

    Returns
    -------
    logits, cache
        ``[vocab]`` float32 of the next token, and the prompt's cache. Recurrent models take
        theirs as ``cache_params``.

    Raises
    ------
    UnsupportedModelError
        The model's cache is not a transformers Cache.
    """
    prompt = torch.from_numpy(ids.astype(np.int64)).to(loaded.device)[None]
    given = {} if into is None else cache_argument(loaded.model, into)
    reusable = isinstance(loaded, ReusableModel)
    with fast_linear_layers(loaded.model, ordinary=True) if reusable else nullcontext():
        out = loaded.model(input_ids=prompt, use_cache=True, logits_to_keep=1, **given)
    if into is not None:
        require_used(into.get_seq_length(), len(ids), "rows in the cache")
    cache = cache_in(out)
    if not isinstance(cache, Cache):
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} has no transformers Cache: generate() and stream() "
            "work with it, prefill() has nothing to return"
        )
    return out.logits[0, -1].float(), cache


def prefill_into(loaded: ReusableModel, ids: IntArray, cache: SplicedCache) -> torch.Tensor:
    """Prefill ``ids`` ``[tokens]`` into an empty cache, long prompts in pieces.

    A piece's activations take a few MB, those of a whole prompt of 32,768 tokens several GB. In
    float32 on a GPU all prompts use ragkv's attention, which needs no scores in memory.

    Returns
    -------
    torch.Tensor
        The next token's logits, ``[vocab]`` float32.
    """
    on_cpu = loaded.device.type == "cpu"
    size = PIECE_CPU if on_cpu else PIECE
    is_short = len(ids) <= size and (on_cpu or loaded.dtype != torch.float32)
    if is_short or loaded.architecture.is_beyond(len(ids)):  # one rotary table for all
        return full_prefill(loaded, ids, cache)[0]
    for piece in np.split(np.arange(len(ids)), range(size, len(ids), size)):
        logits = subset_forward(loaded, SubsetPass(ids[: piece[-1] + 1], piece, cache))
    return logits[-1]


def rounding_kl(loaded: ReusableModel, ids: IntArray) -> float:
    """Return the effect of rounded products on the distribution of the token after ``ids``.

    It is the Kullback-Leibler divergence of a pass over all tokens from the same in float32, in
    nats; 0 if no product is rounded. The model's lock must be held.
    """
    with in_float32(loaded.model):
        exact = torch.log_softmax(_by_one_pass(loaded, ids), -1)
    rounded = torch.log_softmax(_by_one_pass(loaded, ids), -1)
    return float(torch.nn.functional.kl_div(rounded, exact, log_target=True, reduction="sum"))


def _by_one_pass(loaded: ReusableModel, ids: IntArray) -> torch.Tensor:
    """Return the next token's logits, ``[vocab]`` float32."""
    cache = SplicedCache(loaded, 0, spare=len(ids))
    return subset_forward(loaded, SubsetPass(ids, np.arange(len(ids)), cache))[-1]
