"""Memory that ran out: which errors say so, what they hold, and what can be freed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ragkv.errors import OutOfMemoryError, RagKVError
from ragkv.model.loaded import LoadedModel

Given = ParamSpec("Given")
Done = TypeVar("Done")
_SAID = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""In plain RuntimeErrors: of torch's allocator for the CPU, of CUDA's libraries, of Triton."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, the host's or a device's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    plain = isinstance(error, RuntimeError) and not isinstance(error, RagKVError)
    return plain and any(part in str(error) for part in _SAID)


def release_calls(error: BaseException) -> str:
    """Let an error, and those before it, keep none of the calls that they ended.

    Their local variables are tensors of a failed request, and of others. Returns what the
    traceback was.
    """
    calls = "".join(traceback.format_tb(error.__traceback__))
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None  # a frame keeps its function, with what that has around it
        each = each.__cause__ or each.__context__
    return calls


def release_unused(loaded: LoadedModel) -> None:
    """Free the memory that is kept for later requests."""
    loaded.workspace.release()
    if loaded.device.type != "cpu":
        device: Any = torch.get_device_module(loaded.device)
        getattr(device, "empty_cache", lambda: None)()


def typed_memory_errors(call: Callable[Given, Done]) -> Callable[Given, Done]:
    """Let a call raise OutOfMemoryError where memory runs out; the error holds no memory itself."""

    @wraps(call)
    def typed(*args: Given.args, **kwargs: Given.kwargs) -> Done:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if isinstance(error, OutOfMemoryError):
                traceback.clear_frames(error.__traceback__)
                raise
            (said, *_) = str(error).splitlines() or [type(error).__name__]
            calls = release_calls(error)
        lack = OutOfMemoryError(
            f"Memory ran out ({said}): let fewer requests run at once (max_running, kv_bytes), or "
            "give the store's tiers less (memory_bytes, device_bytes, history_bytes)"
        )
        lack.add_note(calls)
        raise lack

    return typed
