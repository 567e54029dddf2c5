"""How a mixture-of-experts model computes its experts: for one token, or for several."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import PreTrainedModel


def decoding_experts(model: PreTrainedModel, rows: int) -> AbstractContextManager[None]:
    """Compute the experts of one row as transformers' decoding does, of several as its prefill."""
    if rows != 1:
        return nullcontext()
    switch: Any = model
    own: AbstractContextManager[None] = switch._optimize_model_for_decode()  # noqa: SLF001
    return own
