"""Decoding steps that compute, beside the drawn token, what the answer may copy next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from transformers.cache_utils import Cache

from ragkv.model.load import LoadedModel
from ragkv.recompute.forward import passes_instead, subset_call
from ragkv.select.ahead import Ahead
from ragkv.splice.buffer import SplicedCache


@contextmanager
def repairing_ahead(
    loaded: LoadedModel, cache: Cache | None, ahead: Ahead | None
) -> Iterator[None]:
    """Let the model's steps over the cache compute stale tokens that :class:`Ahead` names.

    A step is a call with one token behind the prompt. Its logits are those over the repaired
    rows, which stay repaired. Calls with several tokens, and those behind tokens that were
    not fed in the block, stay as they are. Without ``ahead`` nothing happens.
    """
    if ahead is None or not isinstance(cache, SplicedCache):
        yield
        return
    prompt, ours = ahead.prompt, cache
    answer: list[int] = []

    def instead(given: dict[str, Any]) -> AbstractContextManager[dict[str, Any]] | None:
        length, fed = ours.get_seq_length(), given.get("input_ids")
        del answer[max(0, length - len(prompt)) :]
        if fed is None or len(prompt) + len(answer) != length:
            return None
        answer.extend(fed[0].tolist())
        if fed.shape[1] != 1:
            return None
        rows = ahead.take(answer)
        if not len(rows):
            return None
        ids = np.concatenate([prompt, np.asarray(answer, dtype=prompt.dtype)])
        return subset_call(loaded, ids, np.append(rows, length), ours)

    with passes_instead(loaded, ours, instead):
        yield
