"""The subset forward pass: fresh K and V for the chosen rows, in the real prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.attention import Pass, last_row_ends, subset_attention
from ragkv.attend.observe import Observer, StopPass
from ragkv.attend.rows import Rows
from ragkv.attend.sparse import SparseRows
from ragkv.model.load import LoadedModel
from ragkv.model.matrices import by_onednn
from ragkv.model.streams import to_device
from ragkv.prompt.tokens import IntArray
from ragkv.splice.buffer import BeforeWrite, SplicedCache
from ragkv.splice.overlap import OverlappedCache


@torch.no_grad()
def subset_forward(
    loaded: LoadedModel,
    ids: IntArray,
    rows: npt.NDArray[np.int64],
    cache: SplicedCache,
    *,
    drift: BeforeWrite | None = None,
    sparse: SparseRows | None = None,
) -> torch.Tensor:
    """Compute the rows at their true positions and overwrite them in the cache.

    Parameters
    ----------
    ids
        ``[tokens]`` the whole prompt.
    rows
        ``[rows]`` sorted positions to compute. With all of them this is a full prefill.
    drift
        Moves the rows that are not computed, such as :class:`ragkv.recompute.drift.Drift`.
    sparse
        What rows see in the upper layers; None: all before them.

    Returns
    -------
    torch.Tensor
        Logits after the last row, ``[vocab]`` float32.
    """
    with subset_call(loaded, ids, rows, cache, drift=drift, sparse=sparse) as arguments:
        out = loaded.model(**arguments)
    return torch.as_tensor(out.logits[0, -1].float())


@torch.no_grad()
def observed_forward(
    loaded: LoadedModel,
    ids: IntArray,
    rows: npt.NDArray[np.int64],
    cache: SplicedCache,
    observer: Observer,
) -> None:
    """Run the same pass for what can be seen in it.

    Parameters
    ----------
    observer
        Called in every layer before its attention; may end the pass with :class:`StopPass`.
    """
    with suppress(StopPass), subset_call(loaded, ids, rows, cache, observer=observer) as arguments:
        loaded.model(**arguments)


@contextmanager
def subset_as_first_call(
    loaded: LoadedModel,
    ids: IntArray,
    rows: npt.NDArray[np.int64],
    cache: SplicedCache,
    step: Callable[[], AbstractContextManager[None]],
    *,
    drift: BeforeWrite | None = None,
    sparse: SparseRows | None = None,
) -> Iterator[None]:
    """Make the model's next call with this cache the pass over ``rows``.

    For transformers' ``generate``, whose first call would compute the prompt's last
    token over the cache: so the repair gives the first token's logits, and that token
    is not computed twice. The calls after it are ordinary, and have no hooks of this.

    Parameters
    ----------
    rows
        ``[rows]`` sorted; the last is the prompt's last token.
    step
        Entered around the pass, such as a clock's step.
    drift, sparse
        As in :func:`subset_forward`.
    """

    @contextmanager
    def stepping() -> Iterator[dict[str, Any]]:
        with (
            step(),
            subset_call(loaded, ids, rows, cache, drift=drift, sparse=sparse) as arguments,
        ):
            yield arguments
            loaded.wait()
        hooks.close()

    with ExitStack() as hooks:
        hooks.enter_context(passes_instead(loaded, cache, lambda _: stepping()))
        yield


@contextmanager
def passes_instead(
    loaded: LoadedModel,
    cache: SplicedCache,
    instead: Callable[[dict[str, Any]], AbstractContextManager[dict[str, Any]] | None],
) -> Iterator[None]:
    """Let the model's calls with this cache, whoever makes them, be passes over chosen rows.

    Parameters
    ----------
    instead
        Given a call's keyword arguments, returns the pass to make of it
        (:func:`subset_call`), or None to leave the call as it is.
    """
    running = ExitStack()

    def is_foreign(given: object) -> bool:  # not a dict: another's, amid the hook's registration
        return not isinstance(given, dict) or given.get("past_key_values") is not cache

    def before(
        _: object, args: tuple[Any, ...], given: dict[str, Any] | None = None
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        if given is None or is_foreign(given) or "ragkv_pass" in given:
            return None
        if args:
            given = {**given, "input_ids": args[0]}
        made = instead(given)
        if made is None:
            return None
        return (), {**given, "attention_mask": None, **running.enter_context(made)}

    def after(_: object, __: object, given: object, *___: object) -> None:
        if not is_foreign(given):
            running.close()

    enter = loaded.model.register_forward_pre_hook(before, with_kwargs=True)
    leave = loaded.model.register_forward_hook(after, with_kwargs=True, always_call=True)
    with running:
        try:
            yield
        finally:
            enter.remove()
            leave.remove()


@contextmanager
def subset_call(
    loaded: LoadedModel,
    ids: IntArray,
    rows: npt.NDArray[np.int64],
    cache: SplicedCache,
    *,
    observer: Observer | None = None,
    drift: BeforeWrite | None = None,
    sparse: SparseRows | None = None,
) -> Iterator[dict[str, Any]]:
    """Prepare model and cache for a pass over the rows; give the call's arguments.

    ``ids`` are all tokens that count as there, drawn ones included; else as in
    :func:`subset_forward`.
    """
    if loaded.architecture is None:
        raise ValueError("a subset pass needs a supported model")
    computed = Rows.on(loaded.device, rows)
    where = computed.positions
    chosen = to_device(ids[rows].astype(np.int64), loaded.device)
    overlap = cache.overlap if isinstance(cache, OverlappedCache) else None
    positions = where if overlap is None else overlap.at(where)
    one = Pass(computed, loaded.architecture.windows, observer, overlap, sparse, last_row_ends=True)
    cache.write_at(where, drift, length=len(ids))
    model = loaded.model
    try:
        with subset_attention(model, one), last_row_ends(model), by_onednn(model):
            yield {
                "input_ids": chosen[None],
                "position_ids": positions[None],
                "past_key_values": cache,
                "use_cache": True,
                "logits_to_keep": 1,
                "ragkv_pass": one,
            }
    finally:
        cache.write_at(None)
