"""Passes of few rows as CUDA graphs: one launch in place of a thousand.

On a GPU such a pass takes as long as its launches, however few its rows are. A graph repeats them
from one call. Its inputs are numbers in a table (:class:`ragkv_kernels.RowTable`): the graph of a
number of rows serves every prompt, and several prompts at once. A number of rows is captured at
its second use, since a capture takes some 100 ms, and passes of fewer rows are padded to it.

A graph holds the addresses of the weights. Before each replay they are compared with the model's;
graphs of other addresses, hooks or adapters are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from ragkv_kernels import CacheRows, RowTable
from transformers import PreTrainedModel

from ragkv.attend.attention import TablePass, subset_attention
from ragkv.attend.forward import SubsetPass
from ragkv.model.architecture import config_of
from ragkv.model.calls import cache_argument, require_used
from ragkv.model.fingerprint import adapters_of
from ragkv.model.linear import fast_linear_layers
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.model.lock import ModelLock, lock_of
from ragkv.splice.table import TableCache

_log = logging.getLogger(__name__)
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows that are captured."""
_WARM_UPS = 2
"""Calls before a capture: they compile kernels and allocate workspaces."""

Compute = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """What captures a function's work."""

    def capture(self, compute: Compute) -> tuple[Callable[[], object], torch.Tensor]:
        """Return what repeats the work, and the tensor that it writes its result to."""
        ...


class CudaRecorder:
    """Captures CUDA graphs, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, compute: Compute) -> tuple[Callable[[], object], torch.Tensor]:
        """Capture on a side stream; other threads go on with their work on the device."""
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
    """A captured pass: its inputs, what repeats it, and its logits ``[rows, vocab]`` float32."""

    table: RowTable
    replay: Callable[[], object]
    logits: torch.Tensor


class Graphs:
    """The captured passes of one model; its lock must be held."""

    def __init__(self, lock: ModelLock) -> None:
        del lock  # there is one object a lock
        self._recorder: Recorder | None = None
        self._graphs: dict[int, _Graph] = {}
        self._used = set[int]()
        self._watched: _Watched | None = None
        self._looked_over = False
        self._state: object = None
        self._refused = False
        self.replays = 0
        """Passes that were computed by a graph."""

    def look_over(self) -> None:
        """Let the next pass compare the whole model with the captured one, not its weights alone.

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
        rows = sum(len(subset.rows) for subset in subsets)
        size = next((each for each in ROWS if rows <= each), None)
        if size is None or not all(map(_is_plain, subsets)):
            return None
        self._compare(loaded)
        graph = self._graph_of(loaded, size, subsets)
        if graph is None:
            return None
        _fill(graph.table, subsets)
        graph.replay()
        self.replays += 1
        return _logits(graph.logits, subsets)

    def drop(self) -> None:
        """Free all graphs."""
        self._graphs.clear()
        self._used.clear()
        self._recorder, self._refused = None, False
        self._watched, self._state = None, None

    def _compare(self, loaded: ReusableModel) -> None:
        """Drop the graphs where the model is no longer the captured one."""
        watched = self._watched
        if watched is None or not self._looked_over:
            self._looked_over = True
            watched = _Watched(loaded.model)
        state = *watched.structure, *watched.state()
        if state != self._state:
            self.drop()
            self._watched, self._state = watched, state
            self._refuse(_obstacle(loaded, watched.hooked))

    def _graph_of(
        self, loaded: ReusableModel, size: int, subsets: Sequence[SubsetPass]
    ) -> _Graph | None:
        """Return the graph of some rows, captured at their second use; None at the first."""
        known = self._graphs.get(size)
        if known is not None or self._refused:
            return known
        if size not in self._used:
            self._used.add(size)
            return None
        try:
            self._graphs[size] = graph = self._capture(loaded, size, subsets)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ValueError) as error:
            self._refuse(f"{type(error).__name__}: {error}")
            return None
        return graph

    @torch.no_grad()
    def _capture(self, loaded: ReusableModel, size: int, subsets: Sequence[SubsetPass]) -> _Graph:
        of, model = loaded.architecture, loaded.model
        table = RowTable(
            size,
            config_of(model).num_attention_heads // of.kv_heads,
            (of.layers, of.kv_heads, of.head_dim),
            dtype=loaded.dtype,
            device=loaded.device,
        )
        cache = TableCache(table, of.layers)
        one = TablePass(table, of.windows)

        def compute() -> torch.Tensor:
            cache.written = one.attended = 0
            out = model(
                input_ids=table.ids[None],
                position_ids=table.positions[None],
                **cache_argument(model, cache),
                use_cache=True,
                ragkv_pass=one,
            )
            require_used(cache.written, of.layers, "layers written")
            require_used(one.attended, of.layers, "layers that called ragkv's attention")
            logits: torch.Tensor = out.logits[0].float()
            return logits

        def within() -> torch.Tensor:
            with subset_attention(model, one), fast_linear_layers(model):
                return compute()

        _fill(table, subsets)
        self._recorder = self._recorder or RECORDERS[loaded.device.type](loaded.device)
        return _Graph(table, *self._recorder.capture(within))

    def _refuse(self, reason: str) -> None:
        """Compute everything without graphs, unless there is no reason for it; say so once."""
        if reason:
            self._refused = True
            self._graphs.clear()
            _log.warning("steps are not captured as CUDA graphs: %s", reason)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""What captures, by type of device; other devices compute every pass anew."""


def graphs_for(loaded: ReusableModel) -> Graphs | None:
    """Return the model's graphs, the same for all engines over it; None on devices without."""
    return lock_of(loaded.model).shared(Graphs) if loaded.device.type in RECORDERS else None


def release_graphs(loaded: LoadedModel) -> None:
    """Free the model's graphs; its lock must be held."""
    if isinstance(loaded, ReusableModel) and (graphs := graphs_for(loaded)) is not None:
        graphs.drop()


def _is_plain(subset: SubsetPass) -> bool:
    """Whether a pass does nothing that depends on its prompt."""
    parts = subset.observer, subset.drift, subset.sparse, subset.leaving
    return all(part is None for part in parts)


def _fill(table: RowTable, subsets: Sequence[SubsetPass]) -> None:
    parts = []
    for subset in subsets:
        subset.cache.extend(len(subset.ids))
        ids, keys, values = subset.ids[subset.rows], subset.cache.keys, subset.cache.values
        parts.append(CacheRows(ids.astype("int64"), subset.rows, keys, values))
    table.fill(parts)


def _logits(logits: torch.Tensor, subsets: Sequence[SubsetPass]) -> list[torch.Tensor]:
    """Return copies: the next replay writes to the same memory."""
    out, last = [], 0
    for subset in subsets:
        last += len(subset.rows)
        out.append(logits[last - subset.keep : last].clone())
    return out


def _obstacle(loaded: ReusableModel, hooked: str | None) -> str:
    """Return why a model's passes cannot be captured; empty where they can."""
    if loaded.architecture.position_limit is not None:
        return "the model's rotary table changes with the prompt's length"
    names = {type(module).__name__ for module in loaded.model.modules()}
    if any("Experts" in name for name in names):
        return "which experts of the model compute depends on the tokens"
    if hooked is not None:
        return f"a hook on {hooked or 'the model'}, which a graph would leave out"
    return ""


class _Watched:
    """What a graph depends on besides its table.

    Attributes
    ----------
    structure
        The parts of the model, and what was added to them; slow to find out.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        named = dict(model.named_modules())
        self._modules = list(named.values())
        self._weights = [*model.parameters(), *model.buffers()]
        replaced = [vars(module).get("forward") for module in self._modules]
        foreign = [id(function) for function in replaced if _is_foreign(function)]
        adapters = adapters_of(model)
        self.structure = [*map(id, self._modules), *foreign, *adapters, model.training]
        self.hooked = next((name for name, module in named.items() if _has_hook(module)), None)

    def state(self) -> tuple[object, ...]:
        """Return the addresses of the weights, and whether there is a hook; takes 0.1 ms."""
        hooked = any(map(_has_hook, self._modules))
        return hooked, *[part.data_ptr() for part in self._weights]


def _has_hook(module: torch.nn.Module) -> bool:
    """Whether a module has somebody else's hook."""
    hooks = module._forward_hooks, module._forward_pre_hooks  # noqa: SLF001
    return any(_is_foreign(hook) for each in hooks if each for hook in each.values())


def _is_foreign(function: object) -> bool:
    own = getattr(getattr(function, "func", function), "__module__", None)
    return function is not None and not str(own).startswith("ragkv.")
