"""A device beside the CPU, written in Python: it stands for a GPU where there is none.

It computes on the CPU, and refuses and notes what a GPU would refuse or be slowed down by:

- A computation with tensors of both devices fails, but for single numbers and indices.
- Whoever looks at its numbers, or copies to or from it without ``non_blocking``, waits for the
  current stream: :data:`waits` notes where.
- What is copied to the host with ``non_blocking`` is not there before somebody has waited.
- Work belongs to the stream that is current. Reading memory that another stream wrote, or
  writing what another one reads, without having waited for it is a :class:`RaceError`, whatever
  came out: streams know of one another's work by vector clocks.
"""

import itertools
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch.utils import backend_registration

NAME = "second"

waits: list[str] = []
"""Where the host waited for the device, ``file:function`` of ragkv, in order."""

_COPIES = {"copy_", "_to_copy", "_copy_from"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_FACTORIES = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step")
# the fallback for all operations does not see those that torch.tensor() makes
_SEEN_ALONE = ("_copy_from", "copy_", "_to_copy", "detach", "alias", "lift_fresh", "lift")
_lock = threading.RLock()


class RaceError(AssertionError):
    """Memory is used on a stream that has not waited for the one that uses it, too."""


class Stream:
    """Work that is done in the order in which it is given."""

    numbers = itertools.count()

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.number = next(self.numbers)
        self.known: dict[int, int] = {}  # stream -> how much of its work is done before what comes

    def wait_stream(self, other: Self) -> None:
        with _lock:
            _learn(self.known, other.known)

    def synchronize(self) -> None:
        _wait(self)


class Use(NamedTuple):
    """A stream's last use of some bytes of a storage."""

    start: int
    stop: int
    stream: int
    written: bool


class Memory:
    """Who has used a tensor's storage since it was last written: the use -> the stream's work."""

    def __init__(self) -> None:
        self.uses: dict[Use, int] = {}


_default = Stream()
_host: dict[int, int] = {}
_here = threading.local()
_pending: list[tuple[tuple[Stream, int], torch.Tensor, torch.Tensor]] = []


def current_stream(device: object = None) -> Stream:
    return getattr(_here, "stream", _default)


@contextmanager
def stream(given: Stream) -> Iterator[None]:
    before = current_stream()
    _here.stream = given
    try:
        yield
    finally:
        _here.stream = before


class Tensor(torch.Tensor):
    """A tensor on the device; ``raw`` has its numbers, ``memory`` is shared with its views."""

    raw: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, raw: torch.Tensor, memory: Memory | None = None) -> Self:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.raw, tensor.memory = raw, memory or Memory()
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"second({self.raw})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do one operation of torch on the current stream."""
    name, arguments, uses = _signature(func)
    given = {**dict(zip(arguments, args, strict=False)), **kwargs}
    leaves = {key: _tensors(value) for key, value in given.items()}
    tensors = [tensor for each in leaves.values() for tensor in each]
    ours = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if ours and name not in _COPIES:
        _refuse_a_mixture(func, name, args, tensors)
    out = _compute(func, args, kwargs)
    if any(each.shape != each.raw.shape for each in ours):
        raise NotImplementedError(f"{func} resizes what it is given")
    made = _wrapped(out, ours)
    with _lock:
        work = _work()
        for key, written in uses.items():
            _use(func, leaves.get(key, ()), work, written=written)
        old = [each.memory for each in ours]
        new = [each for each in _tensors(made) if getattr(each, "memory", None) not in old]
        _use(func, new, work, written=True)
    target = given.get("device")
    to_host = bool(ours) and target is not None and torch.device(target).type == "cpu"
    from_host = bool(tensors) and not ours and target is not None
    if name == "_local_scalar_dense":
        _wait(work[0])
    elif to_host or from_host or (name in _COPIES and 0 < len(ours) < len(tensors)):
        if not given.get("non_blocking"):
            _wait(work[0])
        elif to_host:
            _pending.append((work, out, out.clone()))
            out.fill_(float("nan") if out.is_floating_point() else 0)
    if to_host:
        return out
    return args[0] if func._schema.is_mutable and name.endswith("_") else made


@cache
def _signature(func: Any) -> tuple[str, list[str], dict[str, bool]]:
    """Return the name, the arguments, and those not only viewed: whether each is written."""
    infos = {each.name: each.alias_info for each in func._schema.arguments}
    uses = {key: info is not None for key, info in infos.items() if info is None or info.is_write}
    return func._schema.name.split("::")[1], list(infos), uses


def _tensors(value: object) -> Sequence[torch.Tensor]:
    """Return a tensor, or those in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return ()


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply to every tensor in lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_mapped(function, each) for each in value)
    return value


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _mapped(lambda tensor: getattr(tensor, "raw", tensor), (args, kwargs))
    if func is torch.ops.aten.histc.default:  # of integers, as CUDA counts them
        args = (args[0].float(), *args[1:])
    on_cpu = {"device": "cpu"} if kwargs.get("device") is not None else {}
    return func(
        *args, **{**kwargs, **on_cpu, **({"pin_memory": False} if "pin_memory" in kwargs else {})}
    )


def _refuse_a_mixture(
    func: Any, name: str, args: tuple[Any, ...], tensors: list[torch.Tensor]
) -> None:
    if name in _INDEXING and isinstance(args[0], Tensor):  # indices may come from the host
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
    if any(each.ndim and not isinstance(each, Tensor) for each in tensors):
        shapes = [f"{tuple(each.shape)} on {each.device}" for each in tensors]
        raise RuntimeError(f"{func} of tensors on two devices: {', '.join(shapes)}")


def _wrapped(out: Any, given: list[Tensor]) -> Any:
    """Wrap results; those that are views share their memory with what they are views of."""
    memories = {each.raw.untyped_storage().data_ptr(): each.memory for each in given}

    def wrap(raw: torch.Tensor) -> torch.Tensor:
        if isinstance(raw, Tensor):
            return raw
        address = raw.untyped_storage().data_ptr()
        return Tensor(raw, memories.get(address) if address else None)

    return _mapped(wrap, out)


# ---- who knows of what


def _learn(known: dict[int, int], more: dict[int, int]) -> None:
    for number, work in more.items():
        known[number] = max(known.get(number, 0), work)


def _work() -> tuple[Stream, int]:
    """Give the current stream a piece of work."""
    on = current_stream()
    _learn(on.known, _host)
    on.known[on.number] = on.known.get(on.number, 0) + 1
    return on, on.known[on.number]


def _use(func: Any, tensors: Sequence[Any], work: tuple[Stream, int], *, written: bool) -> None:
    on, number = work
    for leaf in (leaf for leaf in tensors if isinstance(leaf, Tensor)):
        use = Use(*_bytes_of(leaf.raw), on.number, written)
        uses = leaf.memory.uses
        for old, last in uses.items():
            apart = old.stop <= use.start or use.stop <= old.start
            if not apart and (written or old.written) and on.known.get(old.stream, 0) < last:
                raise RaceError(f"{func} on stream {on.number} did not wait: {old}, {_place()}")
        if written:
            for old in [old for old in uses if use.start <= old.start and old.stop <= use.stop]:
                del uses[old]
        uses[use] = number


def _bytes_of(raw: torch.Tensor) -> tuple[int, int]:
    """Return where the tensor begins and ends in its storage."""
    first = raw.storage_offset()
    last = first + sum(
        (size - 1) * step for size, step in zip(raw.shape, raw.stride(), strict=True)
    )
    return first * raw.element_size(), (last + 1 if raw.numel() else first) * raw.element_size()


def _wait(on: Stream) -> None:
    with _lock:
        _learn(_host, on.known)
        for copy in list(_pending):
            (by, number), out, numbers = copy
            if _host.get(by.number, 0) >= number:
                out.copy_(numbers)
                _pending.remove(copy)
    waits.append(_place())


def _place() -> str:
    for frame, _ in traceback.walk_stack(None):
        code = frame.f_code
        if frame.f_globals["__name__"].startswith("ragkv."):
            return f"{code.co_filename.rsplit('/', 1)[1]}:{code.co_name}"
    return "elsewhere"


# ---- torch's side


class _Module(backend_registration._DummyBackendModule):
    """``torch.second``."""

    Stream = Stream
    current_stream = staticmethod(current_stream)
    stream = staticmethod(stream)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None:
        _wait(current_stream())


def install() -> list[torch.library.Library]:
    """Make ``torch.device("second")`` known to this process; keep what is returned."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for full_name in (*_FACTORIES, *_SEEN_ALONE):
        packet, _, overload = full_name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(full_name, _kernel(op, makes=full_name in _FACTORIES), "PrivateUse1")
    torch.accelerator.synchronize = lambda device=None: _wait(current_stream())
    return [everything, aten]


def _kernel(op: Any, *, makes: bool) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run(op, args, {**kwargs, "device": torch.device(NAME, 0)} if makes else kwargs)

    return kernel
