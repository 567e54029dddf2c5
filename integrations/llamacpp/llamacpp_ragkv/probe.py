"""Check at start that llama.cpp and ragkv have the same rows, and in which format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llamacpp_ragkv.blob import BlobFormat, Matrix, SequenceRows, parse, render
from llamacpp_ragkv.library import Library, Part
from ragkv.errors import UnsupportedModelError
from ragkv.model.calls import cache_in
from ragkv.model.loaded import ReusableModel
from ragkv.model.lock import lock_of

_IN_PAIRS = {"llama": True, "qwen2": False}
"""Whether an architecture's files rotate neighbours in place of halves."""
_TEXT = (
    "The harbour was built in 1874 and has two piers of granite. Ships from the north unload timber"
    " at the longer one; the shorter one belongs to the fishermen, who mend their nets on it."
)
_TOKENS = 40
_MOST_KEYS, _MOST_VALUES, _MOST_KL = 0.05, 0.10, 0.05
"""Largest relative norms of differences of K and V, and KL in nats: activations are rounded."""
Ids = npt.NDArray[np.int64]
Call = Callable[..., Any]
"""Calls a function in llama.cpp's thread."""


class RowOrder:
    """Brings rows into llama.cpp's order.

    Raises
    ------
    UnsupportedModelError
        The architecture is untried, or layers have windows.
    """

    def __init__(self, loaded: ReusableModel, architecture: str) -> None:
        self.loaded = loaded
        if architecture not in _IN_PAIRS:
            tried = ", ".join(_IN_PAIRS)
            raise _refused(f"its architecture {architecture!r} is untried; tried are {tried}")
        if any(window is not None for window in loaded.architecture.windows):
            raise _refused("it has sliding windows, whose rows llama.cpp keeps apart")
        if loaded.device.type != "cpu":
            raise _refused(f"its torch model is on {loaded.device}: load it on the CPU")
        self._in_pairs = _IN_PAIRS[architecture]

    def rows(self, begin: int, keys: torch.Tensor, values: torch.Tensor) -> SequenceRows:
        """Return rows from a position on.

        Parameters
        ----------
        keys, values
            ``[layers, kv_heads, tokens, head_dim]``.
        """
        positions = np.arange(begin, begin + keys.shape[2], dtype=np.int32)
        if self._in_pairs:
            keys = keys.reshape(*keys.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
        return SequenceRows(positions, _flat(keys), _flat(values))


def _flat(rows: torch.Tensor) -> Matrix:
    """Return ``[layers, tokens, width]``; bfloat16 as float32, which numpy lacks."""
    rows = rows.float() if rows.dtype == torch.bfloat16 else rows
    flat: Matrix = rows.transpose(1, 2).flatten(2).contiguous().numpy()
    return flat


def probe(order: RowOrder, library: Library, call: Call) -> BlobFormat:
    """Compare a text's rows at the first and the last positions; return their format.

    A token is decoded behind ragkv's rows, too.

    Raises
    ------
    UnsupportedModelError
        A comparison failed; the message says which.
    """
    loaded = order.loaded
    ids = np.asarray(loaded.tokenizer(_TEXT, add_special_tokens=False)["input_ids"])[:_TOKENS]
    last = (loaded.positions or len(ids)) - len(ids)
    for begin in (0, max(0, last)):
        form = _probe_at(call, library, order, ids, begin)
    return form


def _probe_at(call: Call, library: Library, order: RowOrder, ids: Ids, begin: int) -> BlobFormat:
    """Compare the rows of a text from a position on."""
    expected, own = _own_rows(order, ids, begin)
    context = call(library.open, len(ids))
    try:
        call(context.decode, [Part(0, ids[:-1].tolist(), begin)])
        blob = call(context.state, 0)
        form, rows = parse(blob)
        if render(form, rows) != blob:
            raise _refused("llama.cpp's rows cannot be written as they were read")
        for name, found, ours, most in (
            ("keys", rows.keys, own.keys, _MOST_KEYS),
            ("values", rows.values, own.values, _MOST_VALUES),
        ):
            if found.shape != ours.shape:
                raise _refused(f"llama.cpp's {name} have the shape {found.shape}, not {ours.shape}")
            error = float(np.linalg.norm(found - ours) / np.linalg.norm(ours))
            if not error < most:
                raise _refused(f"llama.cpp's {name} differ by {error:.1%} from position {begin} on")
        call(context.restore, 0, render(form, own))
        last = Part(0, ids[-1:].tolist(), begin + len(ids) - 1)
        logits = torch.from_numpy(call(context.decode, [last])[0])[0]
    finally:
        call(context.close)
    if logits.shape != expected.shape:
        raise _refused(f"llama.cpp has {len(logits)} token ids, and the tokenizer {len(expected)}")
    own_log, log = expected.log_softmax(-1), logits.log_softmax(-1)
    kl = float((own_log.exp() * (own_log - log)).sum())
    if not kl < _MOST_KL:
        raise _refused(f"llama.cpp's distribution has a KL of {kl:.3f} behind ragkv's rows")
    return form


@torch.no_grad()
def _own_rows(order: RowOrder, ids: Ids, begin: int) -> tuple[torch.Tensor, SequenceRows]:
    """Return the logits after all tokens, ``[vocab]`` float32, and the rows of all but the last."""
    loaded = order.loaded
    given, positions = torch.from_numpy(ids)[None], torch.arange(begin, begin + len(ids))[None]
    with lock_of(loaded.model), loaded.without_autocast():
        out = loaded.model(input_ids=given, position_ids=positions, use_cache=True)
    cache: Any = cache_in(out)
    keys = torch.cat([layer.keys for layer in cache.layers])
    values = torch.cat([layer.values for layer in cache.layers])
    logits: torch.Tensor = out.logits[0, -1].float()
    return logits, order.rows(begin, keys[:, :, :-1], values[:, :, :-1])


def _refused(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"decoder='llama.cpp' cannot serve this model: {reason}")
