"""The subset forward pass: fresh K and V for the chosen rows, in the real prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.attention import (
    JointPass,
    Pass,
    feed_forward_in_pieces,
    last_row_ends,
    subset_attention,
)
from ragkv.attend.interface import runs_pass
from ragkv.attend.observe import Observer, StopPass
from ragkv.attend.rows import Rows
from ragkv.model.calls import cache_argument, require_used
from ragkv.model.linear import fast_linear_layers
from ragkv.model.loaded import ReusableModel
from ragkv.model.streams import to_device
from ragkv.prompt.tokens import IntArray
from ragkv.splice.buffer import BeforeWrite, SplicedCache
from ragkv.splice.joint import JointCache

if TYPE_CHECKING:
    from ragkv.attend.blocks import BlockAttention
    from ragkv.attend.sparse_rows import SparseRows


@dataclass(frozen=True, slots=True, eq=False)
class SubsetPass:
    """One pass over some rows of a prompt.

    Attributes
    ----------
    ids
        ``[tokens]`` token ids of the prompt, generated tokens included.
    rows
        ``[rows]`` sorted positions to compute. With all of them this is a full prefill.
    cache
        The prompt's cache; the fresh keys and values overwrite its rows.
    observer
        Called in every layer before its attention; can end the pass by :class:`StopPass`.
    drift
        Moves the rows that are not computed, see :class:`ragkv.recompute.drift.Drift`.
    sparse
        Sparse attention in layers without a window; None: all positions up to the row's own.
    keep
        Number of last rows with logits.
    """

    ids: IntArray
    rows: npt.NDArray[np.int64]
    cache: SplicedCache
    observer: Observer | None = None
    drift: BeforeWrite | None = None
    sparse: SparseRows | BlockAttention | None = None
    keep: int = 1


@torch.no_grad()
def subset_forward(loaded: ReusableModel, subset: SubsetPass) -> torch.Tensor:
    """Compute the rows at their true positions and overwrite them in the cache.

    Returns
    -------
    torch.Tensor
        Logits after the last rows, ``[keep, vocab]`` float32.
    """
    with subset_call(loaded, subset) as arguments:
        out = loaded.model(**arguments)
    logits: torch.Tensor = out.logits[0, -subset.keep :].float()
    return logits


@torch.no_grad()
def ordinary_forward(loaded: ReusableModel, subset: SubsetPass) -> torch.Tensor:
    """Compute a pass over the prompt's last rows by an ordinary call of the model.

    On a GPU it needs fewer launches than a subset pass. Returns as :func:`subset_forward`, which
    replaces it between the layers of this thread's pass: there no call is ordinary.
    """
    if runs_pass():
        return subset_forward(loaded, subset)
    cache, count = subset.cache, len(subset.rows)
    with cache.unchanged_by_errors():
        cache.truncate(len(subset.ids) - count)  # without the rows of a refused draft
        out = loaded.model(
            input_ids=_chosen(loaded, subset)[None],
            use_cache=True,
            logits_to_keep=subset.keep,
            **cache_argument(loaded.model, cache),
        )
        require_used(cache.get_seq_length(), len(subset.ids), "rows in the cache")
    logits: torch.Tensor = out.logits[0, -subset.keep :].float()
    return logits


@torch.no_grad()
def observed_forward(loaded: ReusableModel, *subsets: SubsetPass) -> None:
    """Run a pass over one prompt, or a joint pass over several, for the observers.

    In a joint pass only the last prompt's observer can raise :class:`StopPass`, which ends it for
    all. See :func:`joint_forward`; the logits are dropped.
    """
    call = subset_call(loaded, *subsets) if len(subsets) == 1 else _joint_call(loaded, subsets)
    with suppress(StopPass), call as arguments:
        loaded.model(**arguments)


@torch.no_grad()
def joint_forward(loaded: ReusableModel, subsets: Sequence[SubsetPass]) -> list[torch.Tensor]:
    """Compute rows of several prompts in one pass, each over its own cache.

    Linear layers run over all rows together, attention over each prompt's.

    Parameters
    ----------
    subsets
        Passes over different caches, without observers. All rows are on one side of the model's
        position limit.

    Returns
    -------
    list of torch.Tensor
        The logits after each one's last rows, ``[keep, vocab]`` float32.
    """
    if len(subsets) == 1:
        return [subset_forward(loaded, subsets[0])]
    with _joint_call(loaded, subsets) as arguments:
        out = loaded.model(**arguments)
    logits: torch.Tensor = out.logits[0].float()
    return list(torch.split(logits, [subset.keep for subset in subsets]))


@contextmanager
def _joint_call(loaded: ReusableModel, subsets: Sequence[SubsetPass]) -> Iterator[dict[str, Any]]:
    """Prepare model and caches for a joint pass; yield the call's keyword arguments."""
    passes = [_described(loaded, subset, last_row_ends=False) for subset in subsets]
    joint = JointPass(passes, [subset.cache for subset in subsets])
    ends = np.cumsum([len(one.rows) for one in passes])
    kept = [np.arange(end - subset.keep, end) for end, subset in zip(ends, subsets, strict=True)]
    with ExitStack() as stack:
        for subset, one in zip(subsets, passes, strict=True):
            stack.enter_context(_writing(subset, one))
        stack.enter_context(subset_attention(loaded.model, joint))
        stack.enter_context(fast_linear_layers(loaded.model))
        yield {
            "input_ids": torch.cat([_chosen(loaded, subset) for subset in subsets])[None],
            "position_ids": torch.cat([one.rows.positions for one in passes])[None],
            **cache_argument(loaded.model, JointCache(joint.caches)),
            "use_cache": True,
            "logits_to_keep": to_device(np.concatenate(kept), loaded.device),
            "ragkv_pass": joint,
        }


@contextmanager
def subset_call(loaded: ReusableModel, subset: SubsetPass) -> Iterator[dict[str, Any]]:
    """Prepare model and cache for a pass; yield the call's keyword arguments."""
    cache, model = subset.cache, loaded.model
    described = _described(loaded, subset, last_row_ends=1 == subset.keep < len(subset.rows))
    with (
        _writing(subset, described),
        subset_attention(model, described),
        fast_linear_layers(model),  # patches no layer with hooks
        last_row_ends(model, described) if described.last_row_ends else nullcontext(),
        feed_forward_in_pieces(model, described),
    ):
        yield {
            "input_ids": _chosen(loaded, subset)[None],
            "position_ids": described.rows.positions[None],
            **cache_argument(model, cache),
            "use_cache": True,
            "logits_to_keep": subset.keep,
            "ragkv_pass": described,
        }


def _described(loaded: ReusableModel, subset: SubsetPass, *, last_row_ends: bool) -> Pass:
    return Pass(
        Rows.on(loaded.device, subset.rows),
        loaded.architecture.windows,
        subset.observer,
        subset.sparse,
        last_row_ends=last_row_ends,
        tokens=len(subset.ids),
    )


def _chosen(loaded: ReusableModel, subset: SubsetPass) -> torch.Tensor:
    """Return the rows' token ids, ``[rows]`` int64."""
    return to_device(subset.ids[subset.rows].astype(np.int64), loaded.device)


@contextmanager
def _writing(subset: SubsetPass, described: Pass) -> Iterator[None]:
    """Let the pass in the block overwrite its rows in the cache."""
    cache = subset.cache
    with cache.unchanged_by_errors():
        try:
            cache.write_at(described.rows.positions, subset.drift, length=len(subset.ids))
            yield
            require_used(cache.written, len(cache.layers), "layers written")
        finally:
            cache.write_at(None)
