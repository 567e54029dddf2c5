"""Passes of few rows as CUDA graphs: one launch in place of a thousand.

On a GPU the time of such a pass is that of its launches. A graph repeats them in one call. Its
inputs are numbers in a table (:class:`ragkv_kernels.RowTable`): the graph for a number of rows
serves every prompt, and several prompts at once. A number of rows is captured at its second use,
since a capture takes some 100 ms, and passes of fewer rows are padded to it.

The graph of a repair, which is the pass that recomputes a prompt's rows, has a part for each layer.
Between the parts, the rows of entries are loaded and moved by drift (:mod:`ragkv.recompute.drift`),
which depends on the prompt. Passes with an observer, with sparse attention or with more rows are
not captured.

A graph holds the addresses of the weights. Before each replay they are compared with the model's;
graphs of other addresses, hooks or adapters are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from ragkv_kernels import CacheRows, RowTable, paid_rows

from ragkv.attend.attention import TablePass, last_row_ends, subset_attention
from ragkv.attend.forward import SubsetPass, subset_forward
from ragkv.attend.observe import StopPass
from ragkv.attend.recorder import CudaRecorder, Recorder
from ragkv.attend.watched import Watched, obstacle
from ragkv.model.architecture import config_of
from ragkv.model.calls import cache_argument, require_used
from ragkv.model.linear import fast_linear_layers, release_packed
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.model.lock import ModelLock, lock_of
from ragkv.model.memory import is_out_of_memory, release_calls
from ragkv.splice.joint import TableCache

_log = logging.getLogger(__name__)
STEP_ROWS, QUERY_ROWS = (1, 2, 4, 8, 16, 32, 64), (32, 64, 128, 256, 512, 1024)
"""Numbers of rows to capture, for steps and for passes that score the query's attention."""
REPAIR_ROWS = (64, 128, 256, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Numbers of rows to capture, for the pass that recomputes.

With more rows a GPU computes for longer than a host launches.
"""
_LEAST_ROOM = 4096
"""Shortest length of prompts in a capture of the query's attention; then powers of two."""


class _PassOf:
    """Calls of a model over the rows of a table."""

    def __init__(
        self, loaded: ReusableModel, size: int, recorder: Recorder, *, several: bool
    ) -> None:
        of, model = loaded.architecture, loaded.model
        self.table = RowTable(
            size,
            config_of(model).num_attention_heads // of.kv_heads,
            (of.layers, of.kv_heads, of.head_dim),
            dtype=loaded.dtype,
            device=loaded.device,
            several=several,
        )
        first = np.zeros(1, dtype=np.int64)
        self.table.fill([CacheRows(first, first, *self.table.spare)], observed=1)
        self._subsets: Sequence[SubsetPass] = ()
        self._loaded = loaded
        self._recorder = recorder
        self._cache = TableCache(self.table, of.layers)

    def fill(self, subsets: Sequence[SubsetPass], observed: int, *, load: bool) -> None:
        """Overwrite the table with the rows of some passes, their caches loaded or not."""
        parts, self._subsets = [], subsets
        for subset in subsets:
            subset.cache.extend(len(subset.ids), load=load)
            keys, values = subset.cache.rows(slice(None))
            ids = subset.ids[subset.rows].astype(np.int64)
            parts.append(CacheRows(ids, subset.rows, keys, values))
        self.table.fill(parts, observed)

    def release(self) -> None:
        """Let go of the passes and their caches."""
        self._subsets = ()
        self.table.release()

    def __call__(
        self, observer: Callable[..., None] | None = None, *, repairs: bool = False
    ) -> torch.Tensor:
        """Return the logits, ``[rows, vocab]`` float32; the observer can end the pass by StopPass.

        ``repairs``: the logits of the observed row only, and :meth:`_repair` before each layer's
        rows are written.
        """
        model, table, of = self._loaded.model, self.table, self._loaded.architecture
        one, last = TablePass(table, of.windows, observer), table.observed[:1]
        self._cache.written = 0
        self._cache.before_write = self._pause if repairs else None
        with (
            subset_attention(model, one),
            last_row_ends(model, one, last) if repairs else nullcontext(),
            fast_linear_layers(model),
        ):
            out = model(
                input_ids=table.ids[None],
                position_ids=table.positions[None],
                **cache_argument(model, self._cache),
                use_cache=True,
                logits_to_keep=last if repairs else 0,
                ragkv_pass=one,
            )
        self._cache.before_write = None  # a circle would keep the graph's memory
        require_used(self._cache.written, of.layers, "layers written")
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def _pause(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._recorder.pause(partial(self._repair, layer, keys, values))

    @torch.no_grad()
    def _repair(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Load a layer's rows and move those that the pass does not compute.

        ``keys`` and ``values`` are the fresh rows, ``[1, kv_heads, rows, head_dim]``, padded.
        """
        (subset,) = self._subsets
        of_layer, count = subset.cache.layers[layer], len(subset.rows)
        of_layer.load()
        if subset.drift is not None:
            stored_keys, stored_values = of_layer.seen
            fresh = keys[0, :, :count], values[0, :, :count]
            subset.drift(layer, (stored_keys[0], stored_values[0]), fresh)


class _Graph(NamedTuple):
    """A captured pass: its inputs, the function that repeats it, and its result."""

    pass_of: _PassOf
    replay: Callable[[], object]
    result: torch.Tensor


class Graphs:
    """The captured passes of one model; its lock must be held."""

    def __init__(self, lock: ModelLock) -> None:
        del lock  # there is one object a lock
        self._recorder: Recorder | None = None
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._used = set[tuple[object, ...]]()
        self._watched: Watched | None = None
        self._looked_over = False
        self._state: object = None
        self._refused = False
        self._lacks_memory = False
        self.captures = False
        """Whether a pass is being captured: nothing else must be computed between its layers."""
        self.replays = 0
        """Passes that were computed by a graph."""

    def look_over(self) -> None:
        """Make the next pass compare the whole model with the captured one, not only its weights.

        After a capture that ran out of memory, passes can be captured again. The model's lock need
        not be held.
        """
        self._looked_over = self._lacks_memory = False

    def compute(
        self, loaded: ReusableModel, subsets: Sequence[SubsetPass]
    ) -> list[torch.Tensor] | None:
        """Compute passes over different caches by a graph.

        Returns
        -------
        list of torch.Tensor or None
            The logits after each one's last rows, ``[keep, vocab]`` float32; None where there is
            no graph: the passes are still to be computed.
        """
        size = _size(STEP_ROWS, sum(len(subset.rows) for subset in subsets))
        if size is None or not all(map(_is_plain, subsets)):
            return None

        graph = self._graph(loaded, ("steps", size), subsets, lambda pass_of: pass_of())
        return None if graph is None else _logits(graph.result, subsets)

    def repair(self, loaded: ReusableModel, subset: SubsetPass) -> torch.Tensor | None:
        """Compute a pass over one prompt by a graph.

        Returns
        -------
        torch.Tensor or None
            The logits after its last row, ``[1, vocab]`` float32; None as in :meth:`compute`.
        """
        size = _size(REPAIR_ROWS, len(subset.rows))
        if size is None or subset.keep != 1 or not _is_plain(replace(subset, drift=None)):
            return None
        key = "repair", size
        graph = self._graph(loaded, key, [subset], lambda one: one(repairs=True), observed=1)
        return None if graph is None else graph.result.clone()

    def attention_of_query(
        self, loaded: ReusableModel, subset: SubsetPass, layers: Sequence[int], count: int
    ) -> torch.Tensor | None:
        """Compute a pass up to the last of some layers, and its last rows' attention there.

        Parameters
        ----------
        count
            How many of the last rows.

        Returns
        -------
        torch.Tensor or None
            ``[2, tokens]`` float32: sums of :func:`ragkv.attend.observe.attention_of_query`; None
            where there is no graph.
        """
        size = _size(QUERY_ROWS, len(subset.rows))
        if size is None or not _is_plain(subset):
            return None
        room = max(_LEAST_ROOM, 1 << (len(subset.ids) - 1).bit_length())

        def paid(pass_of: _PassOf) -> torch.Tensor:
            total = torch.zeros(2, room, dtype=torch.float32, device=loaded.device)

            def observe(layer: int, query: torch.Tensor, lse: torch.Tensor, scaling: float) -> None:
                if layer in layers:
                    window = loaded.architecture.windows[layer]
                    part = paid_rows(
                        query,
                        pass_of.table,
                        layer,
                        lse,
                        room=room,
                        window=window,
                        scaling=scaling,
                    )
                    total.add_(part)
                if layer == layers[-1]:
                    raise StopPass

            with suppress(StopPass):
                pass_of(observe)
            return total

        key = "query", size, room, tuple(layers)
        graph = self._graph(loaded, key, [subset], paid, observed=count)
        return None if graph is None else graph.result[:, : len(subset.ids)].clone()

    def drop(self) -> None:
        """Free all graphs."""
        self._graphs.clear()
        self._used.clear()
        self._recorder, self._refused = None, False
        self._watched, self._state = None, None

    def _compare(self, loaded: ReusableModel) -> None:
        """Drop the graphs if the model has changed since the capture."""
        watched = self._watched
        if watched is None or not self._looked_over:
            self._looked_over = True
            watched = Watched(loaded.model)
        state = *watched.structure, *watched.state()
        if state != self._state:
            self.drop()
            self._watched, self._state = watched, state
            self._refuse(obstacle(loaded, watched.hooked))

    def _graph(
        self,
        loaded: ReusableModel,
        key: tuple[object, ...],
        subsets: Sequence[SubsetPass],
        compute: Callable[[_PassOf], torch.Tensor],
        observed: int = 0,
    ) -> _Graph | None:
        """Return the graph of ``key``, replayed; captured at its second use, None at the first."""
        self._compare(loaded)
        if self._refused:
            return None
        graph = self._graphs.get(key)
        if graph is None and (key not in self._used or self._lacks_memory):
            self._used.add(key)
            return None
        if graph is None:
            try:
                graph = self._capture(loaded, key, compute)
            except (MemoryError, RuntimeError, NotImplementedError, ValueError) as error:
                if is_out_of_memory(error):  # perhaps the pass itself fits
                    release_calls(error)
                    self._lacks_memory = True
                else:
                    self._refuse(f"{type(error).__name__}: {error}")
                return None
            self._graphs[key] = graph
        try:
            graph.pass_of.fill(subsets, observed, load=key[0] != "repair")
            graph.replay()
        finally:
            graph.pass_of.release()
        self.replays += 1
        return graph

    @torch.inference_mode(mode=False)  # its tensors are overwritten later, in whatever mode
    def _capture(
        self,
        loaded: ReusableModel,
        key: tuple[object, ...],
        compute: Callable[[_PassOf], torch.Tensor],
    ) -> _Graph:
        """Capture a pass over one row of the table's spare slot, and padding."""
        recorder = self._recorder = self._recorder or RECORDERS[loaded.device.type](loaded.device)
        size = int(key[1])  # type: ignore[call-overload]
        pass_of = _PassOf(loaded, size, recorder, several=key[0] == "steps")

        @torch.no_grad()
        def work() -> torch.Tensor:
            self.captures = True
            try:
                return compute(pass_of)
            finally:
                self.captures = False

        graph = _Graph(pass_of, *recorder.capture(work))
        pass_of.release()
        _log.info("captured a pass of %s rows (%s)", size, key[0])
        return graph

    def _refuse(self, reason: str) -> None:
        """Stop capturing and log the reason, if there is one."""
        if reason:
            self._refused = True
            self._graphs.clear()
            _log.warning("passes are not captured as CUDA graphs: %s", reason)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""Recorders by type of device; other devices have no graphs."""


def graphs_for(loaded: ReusableModel) -> Graphs | None:
    """Return the model's graphs, shared by its engines; None on devices without graphs."""
    return lock_of(loaded.model).shared(Graphs) if loaded.device.type in RECORDERS else None


@torch.no_grad()
def repair_forward(loaded: ReusableModel, subset: SubsetPass) -> torch.Tensor:
    """Compute a pass as :func:`ragkv.attend.forward.subset_forward`, by a graph if there is one."""
    graphs = graphs_for(loaded)
    logits = None if graphs is None else graphs.repair(loaded, subset)
    return subset_forward(loaded, subset) if logits is None else logits


def look_over(loaded: ReusableModel) -> None:
    """Call :meth:`Graphs.look_over` where there are graphs: once before a request's passes."""
    graphs = graphs_for(loaded)
    if graphs is not None:
        graphs.look_over()


def release_kept(loaded: LoadedModel) -> None:
    """Free everything that is kept for a model's requests: memory, packed weights, graphs.

    The model's lock must be held.
    """
    loaded.workspace.release()
    release_packed(loaded.model)
    if isinstance(loaded, ReusableModel) and (graphs := graphs_for(loaded)) is not None:
        graphs.drop()


def _is_plain(subset: SubsetPass) -> bool:
    """Whether a pass has no part that depends on its prompt."""
    parts = subset.observer, subset.drift, subset.sparse
    return all(part is None for part in parts)


def _size(sizes: Sequence[int], rows: int) -> int | None:
    """Return the smallest captured size with room for the rows, or None."""
    return next((size for size in sizes if rows <= size), None)


def _logits(logits: torch.Tensor, subsets: Sequence[SubsetPass]) -> list[torch.Tensor]:
    """Return copies of the logits, which the next replay overwrites."""
    out, last = [], 0
    for subset in subsets:
        last += len(subset.rows)
        out.append(logits[last - subset.keep : last].clone())
    return out
