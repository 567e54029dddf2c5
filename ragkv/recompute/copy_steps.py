"""Decoding steps that compute, beside the drawn token, what the answer may copy next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ragkv.attend.forward import passes_instead, subset_call
from ragkv.model.load import LoadedModel
from ragkv.prompt.tokens import IntArray
from ragkv.recompute.copy_repair import Ahead
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
    experts = _experts_of(loaded.model)

    @contextmanager
    def several(rows: npt.NDArray[np.int64], ids: IntArray) -> Iterator[dict[str, Any]]:
        with subset_call(loaded, ids, rows, ours) as arguments, _computed(loaded.model, experts):
            yield arguments

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
        return several(np.append(rows, length), ids)

    with passes_instead(loaded, ours, instead):
        yield


def _experts_of(model: PreTrainedModel) -> dict[str, str]:
    """Return how a model's experts are computed, by part of its configuration."""
    asked: Callable[[], dict[str, str]] = getattr(model, "get_experts_implementation", dict)
    return asked()


@contextmanager
def _computed(model: PreTrainedModel, experts: dict[str, str]) -> Iterator[None]:
    """Let experts be computed as before the answer.

    On a GPU transformers' steps take a way that is quick for one token, and copies the weights of
    its experts for every further one.
    """
    now = _experts_of(model)
    if now == experts:
        yield
        return
    switch: Any = model
    switch.set_experts_implementation(experts)
    try:
        yield
    finally:
        switch.set_experts_implementation(now)
