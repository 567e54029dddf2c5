"""Passes of few rows as CUDA graphs: one launch in place of a thousand.

On a GPU the time of such a pass is that of its launches. A graph repeats them in one call. Its
inputs are numbers in a table (:class:`ragkv_kernels.RowTable`): the graph for a number of rows
serves every prompt, and several prompts at once. A number of rows is captured at its second use,
since a capture takes some 100 ms, and passes of fewer rows are padded to it.

A graph holds the addresses of the weights. Before each replay they are compared with the model's;
graphs of other addresses, hooks or adapters are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from ragkv_kernels import CacheRows, RowTable, paid_rows
from transformers import PreTrainedModel

from ragkv.attend.attention import TablePass, subset_attention
from ragkv.attend.forward import SubsetPass
from ragkv.attend.observe import StopPass
from ragkv.model.architecture import config_of
from ragkv.model.calls import cache_argument, require_used
from ragkv.model.fingerprint import adapters_of
from ragkv.model.linear import fast_linear_layers, release_packed
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.model.lock import ModelLock, lock_of
from ragkv.model.memory import is_out_of_memory, release_calls
from ragkv.splice.joint import TableCache

_log = logging.getLogger(__name__)
STEP_ROWS, QUERY_ROWS = (1, 2, 4, 8, 16, 32, 64), (32, 64, 128, 256, 512)
"""Numbers of rows to capture, for steps and for passes that score the query's attention."""
_LEAST_ROOM = 4096
"""Shortest length of prompts in a capture of such a pass; longer ones are powers of two."""
_WARM_UPS = 2
"""Calls before a capture: they compile kernels and allocate workspaces."""

Compute = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Captures a function's work."""

    def capture(self, compute: Compute) -> tuple[Callable[[], object], torch.Tensor]:
        """Return a function that repeats the work, and the tensor with its result."""
        ...


class CudaRecorder:
    """Captures CUDA graphs in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, compute: Compute) -> tuple[Callable[[], object], torch.Tensor]:
        """Capture on a side stream; other threads can use the device meanwhile."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            out = compute()
        return graph.replay, out


class _Graph(NamedTuple):
    """A captured pass: its inputs, the function that repeats it, and its result."""

    table: RowTable
    replay: Callable[[], object]
    result: torch.Tensor


class _PassOf:
    """Calls of a model over the rows of a table."""

    def __init__(self, loaded: ReusableModel, size: int, *, several: bool) -> None:
        of, model = loaded.architecture, loaded.model
        self.table = RowTable(
            size,
            config_of(model).num_attention_heads // of.kv_heads,
            (of.layers, of.kv_heads, of.head_dim),
            dtype=loaded.dtype,
            device=loaded.device,
            several=several,
        )
        self._loaded = loaded
        self._cache = TableCache(self.table, of.layers)

    def __call__(self, observer: Callable[..., None] | None) -> Any:
        """Return the model's output for all rows; the observer can end the pass by StopPass."""
        model, table, of = self._loaded.model, self.table, self._loaded.architecture
        one = TablePass(table, of.windows, observer)
        self._cache.written = 0
        with subset_attention(model, one), fast_linear_layers(model):
            out = model(
                input_ids=table.ids[None],
                position_ids=table.positions[None],
                **cache_argument(model, self._cache),
                use_cache=True,
                ragkv_pass=one,
            )
        require_used(self._cache.written, of.layers, "layers written")
        return out


class Graphs:
    """The captured passes of one model; its lock must be held."""

    def __init__(self, lock: ModelLock) -> None:
        del lock  # there is one object a lock
        self._recorder: Recorder | None = None
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._used = set[tuple[object, ...]]()
        self._watched: _Watched | None = None
        self._looked_over = False
        self._state: object = None
        self._refused = False
        self.captures = False
        """Whether a pass is being captured: nothing else must be computed between its layers."""
        self.replays = 0
        """Passes that were computed by a graph."""

    def look_over(self) -> None:
        """Make the next pass compare the whole model with the captured one, not only its weights.

        The model's lock need not be held.
        """
        self._looked_over = False

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

        def drawn_from(pass_of: _PassOf) -> torch.Tensor:
            logits: torch.Tensor = pass_of(None).logits[0].float()
            return logits

        graph = self._graph(loaded, ("steps", size), subsets, drawn_from)
        return None if graph is None else _logits(graph.result, subsets)

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
            watched = _Watched(loaded.model)
        state = *watched.structure, *watched.state()
        if state != self._state:
            self.drop()
            self._watched, self._state = watched, state
            self._refuse(_obstacle(loaded, watched.hooked))

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
        if graph is None and key not in self._used:
            self._used.add(key)
            return None
        if graph is None:
            try:
                graph = self._capture(loaded, key, subsets, compute, observed)
            except (MemoryError, RuntimeError, NotImplementedError, ValueError) as error:
                if is_out_of_memory(error):  # perhaps the pass itself fits
                    release_calls(error)
                    self._used.discard(key)
                else:
                    self._refuse(f"{type(error).__name__}: {error}")
                return None
            self._graphs[key] = graph
        try:
            _fill(graph.table, subsets, observed)
            graph.replay()
        finally:
            graph.table.release()
        self.replays += 1
        return graph

    @torch.inference_mode(mode=False)  # its tensors are overwritten later, in whatever mode
    def _capture(
        self,
        loaded: ReusableModel,
        key: tuple[object, ...],
        subsets: Sequence[SubsetPass],
        compute: Callable[[_PassOf], torch.Tensor],
        observed: int,
    ) -> _Graph:
        pass_of = _PassOf(loaded, int(key[1]), several=key[0] == "steps")  # type: ignore[call-overload]
        _fill(pass_of.table, subsets, observed)
        self._recorder = self._recorder or RECORDERS[loaded.device.type](loaded.device)

        @torch.no_grad()
        def work() -> torch.Tensor:
            self.captures = True
            try:
                return compute(pass_of)
            finally:
                self.captures = False

        graph = _Graph(pass_of.table, *self._recorder.capture(work))
        _log.info("captured a pass of %s rows (%s)", key[1], key[0])
        return graph

    def _refuse(self, reason: str) -> None:
        """Stop capturing and log the reason, if there is one."""
        if reason:
            self._refused = True
            self._graphs.clear()
            _log.warning("steps are not captured as CUDA graphs: %s", reason)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""Recorders by type of device; other devices have no graphs."""


def graphs_for(loaded: ReusableModel) -> Graphs | None:
    """Return the model's graphs, shared by its engines; None on devices without graphs."""
    return lock_of(loaded.model).shared(Graphs) if loaded.device.type in RECORDERS else None


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


def _fill(table: RowTable, subsets: Sequence[SubsetPass], observed: int = 0) -> None:
    parts = []
    for subset in subsets:
        subset.cache.extend(len(subset.ids))
        ids, keys, values = subset.ids[subset.rows], subset.cache.keys, subset.cache.values
        parts.append(CacheRows(ids.astype("int64"), subset.rows, keys, values))
    table.fill(parts, observed)


def _logits(logits: torch.Tensor, subsets: Sequence[SubsetPass]) -> list[torch.Tensor]:
    """Return copies of the logits, which the next replay overwrites."""
    out, last = [], 0
    for subset in subsets:
        last += len(subset.rows)
        out.append(logits[last - subset.keep : last].clone())
    return out


def _obstacle(loaded: ReusableModel, hooked: str | None) -> str:
    """Return why a model's passes cannot be captured, or an empty text."""
    if loaded.architecture.position_limit is not None:
        return "the model's rotary table changes with the prompt's length"
    names = {type(module).__name__ for module in loaded.model.modules()}
    if any("Experts" in name for name in names):
        return "which experts of the model compute depends on the tokens"
    if hooked is not None:
        return f"a hook on {hooked or 'the model'}, which a graph would leave out"
    return ""


class _Watched:
    """The parts of a model that a graph depends on.

    Attributes
    ----------
    structure
        The model's modules and the changes made to them; slow to collect.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._names = list(dict(model.named_modules()))
        self._modules = list(model.modules())
        self._weights = [*model.parameters(), *model.buffers()]
        replaced = [vars(module).get("forward") for module in self._modules]
        foreign = [id(function) for function in replaced if _is_foreign(function)]
        adapters = adapters_of(model)
        self.structure = [*map(id, self._modules), *foreign, *adapters, model.training]

    @property
    def hooked(self) -> str | None:
        """The first module with a foreign hook, or None."""
        named = zip(self._names, self._modules, strict=True)
        return next((name for name, module in named if _has_hook(module)), None)

    def state(self) -> tuple[object, ...]:
        """Return the hooked module and the addresses of the weights; takes 0.1 ms."""
        return self.hooked, *[part.data_ptr() for part in self._weights]


def _has_hook(module: torch.nn.Module) -> bool:
    """Whether a module has a foreign hook."""
    hooks = module._forward_hooks, module._forward_pre_hooks  # noqa: SLF001
    return any(_is_foreign(hook) for each in hooks if each for hook in each.values())


def _is_foreign(function: object) -> bool:
    own = getattr(getattr(function, "func", function), "__module__", None)
    return function is not None and not str(own).startswith("ragkv.")
