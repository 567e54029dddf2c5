"""Ordinary full prefill: the reference, and the fallback."""

from __future__ import annotations

import numpy as np
import torch
from transformers.cache_utils import Cache

from ragkv.errors import UnsupportedModelError
from ragkv.model.calls import cache_argument, cache_in, require_used
from ragkv.model.loaded import LoadedModel
from ragkv.prompt.tokens import IntArray


@torch.no_grad()
def full_prefill(
    loaded: LoadedModel, ids: IntArray, into: Cache | None = None
) -> tuple[torch.Tensor, Cache]:
    """Prefill ``ids`` ``[tokens]`` as transformers does.

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
        The model's cache is no transformers Cache.
    """
    prompt = torch.from_numpy(ids.astype(np.int64)).to(loaded.device)[None]
    given = {} if into is None else cache_argument(loaded.model, into)
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
