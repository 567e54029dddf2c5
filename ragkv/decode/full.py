"""Ordinary full prefill: the reference, and the fallback."""

from __future__ import annotations

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from ragkv.model.load import LoadedModel
from ragkv.prompt.tokens import IntArray


@torch.no_grad()
def full_prefill(loaded: LoadedModel, ids: IntArray) -> tuple[torch.Tensor, Cache]:
    """Prefill ``ids`` ``[tokens]`` as transformers does.

    Returns
    -------
    logits, cache
        ``[vocab]`` float32 of the next token, and the prompt's cache.
    """
    prompt = torch.from_numpy(ids.astype(np.int64)).to(loaded.device)[None]
    cache = DynamicCache(config=loaded.model.config)
    out = loaded.model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1].float(), cache
