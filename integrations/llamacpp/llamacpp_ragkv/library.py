"""The calls of llama.cpp that decoding needs, by the package ``cyllama``."""

from __future__ import annotations

import logging
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ragkv.errors import MissingDependencyError, ModelNotFoundError, RagKVError

_log = logging.getLogger(__name__)
_F32, _F16, _FLASH_OFF, _FLASH_AUTO = 0, 1, 0, -1
_MOST_TOGETHER = 512
"""Tokens of one call."""


class LlamaCppError(RagKVError, RuntimeError):
    """llama.cpp refused rows, or a step failed."""


class Part(NamedTuple):
    """Tokens of a sequence, from a position on."""

    sequence: int
    tokens: Sequence[int]
    begin: int


class Context(Protocol):
    """Memory of llama.cpp for several sequences. A failed call raises LlamaCppError.

    Attributes
    ----------
    room
        Number of tokens of a sequence.
    sequences
        Number of sequences.
    """

    room: int
    sequences: int

    def decode(self, parts: Sequence[Part]) -> list[npt.NDArray[np.float32]]:
        """Compute parts together; return the logits of each, ``[tokens, vocab]``."""
        ...

    def state(self, sequence: int) -> bytes:
        """Return a sequence's rows, see :mod:`llamacpp_ragkv.blob`."""
        ...

    def restore(self, sequence: int, blob: bytes) -> None:
        """Replace a sequence's rows."""
        ...

    def remove(self, sequence: int, begin: int) -> None:
        """Remove a sequence's rows from a position on."""
        ...

    def close(self) -> None:
        """Release the memory."""
        ...


class Library(Protocol):
    """A loaded GGUF file.

    Attributes
    ----------
    architecture
        The file's ``general.architecture``.
    """

    architecture: str

    def open(self, room: int, sequences: int = 1) -> Context:
        """Return memory for sequences of ``room`` tokens each."""
        ...

    def close(self) -> None:
        """Release the weights."""
        ...


class Cyllama:
    """llama.cpp by ``cyllama``: a :class:`Library`. Every call must come from one thread.

    Parameters
    ----------
    file
        The GGUF file, of a split one the first part.
    threads
        Threads of a step.
    half
        Whether K and V are float16, otherwise float32.
    flash
        Whether attention can be flash attention, without which V is transposed.

    Raises
    ------
    MissingDependencyError
        ``cyllama`` is not installed.
    ModelNotFoundError
        llama.cpp cannot load the file.
    """

    def __init__(self, file: Path, threads: int, *, half: bool = True, flash: bool = True) -> None:
        self._llama = llama_cpp = _imported()
        llama_cpp.disable_logging()
        llama_cpp.llama_backend_init()
        _log.info("llama.cpp: %s", llama_cpp.llama_print_system_info())
        try:
            self._model = llama_cpp.LlamaModel(
                path_model=str(file), params=llama_cpp.LlamaModelParams(), verbose=False
            )
        except Exception as error:
            raise ModelNotFoundError(f"llama.cpp cannot load {file}: {error}") from error
        self.architecture = str(self._model.metadata()["general.architecture"])
        self._params = llama_cpp.LlamaContextParams()
        self._params.n_threads = self._params.n_threads_batch = threads
        self._params.type_k = self._params.type_v = _F16 if half else _F32
        self._params.flash_attn_type = _FLASH_AUTO if flash else _FLASH_OFF
        self._params.n_batch = self._params.n_ubatch = _MOST_TOGETHER

    def open(self, room: int, sequences: int = 1) -> CyllamaContext:
        """Return memory for sequences of ``room`` tokens each."""
        self._params.n_ctx, self._params.n_seq_max = room * sequences, sequences
        return CyllamaContext(self._llama, self._model, self._params, room, sequences)

    def close(self) -> None:
        """Release the weights."""
        self._model.close()


def _imported() -> Any:
    try:
        with _own_symbols():
            from cyllama.llama import llama_cpp
    except ImportError as error:
        raise MissingDependencyError(
            "decoder='llama.cpp' needs cyllama, and it Python 3.12 or later: "
            "pip install ragkv-llamacpp"
        ) from error
    return llama_cpp


@contextmanager
def _own_symbols() -> Iterator[None]:
    """Load a library with its own OpenMP runtime: steps by torch's take twice as long.

    A preloaded allocator must serve all libraries, and prevents that.
    """
    own = getattr(os, "RTLD_DEEPBIND", 0)
    if not own or "LD_PRELOAD" in os.environ:
        yield
        return
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | own)
    try:
        yield
    finally:
        sys.setdlopenflags(flags)


class CyllamaContext:
    """A :class:`Context` of ``cyllama``."""

    def __init__(self, llama: Any, model: Any, params: Any, room: int, sequences: int) -> None:
        self.room, self.sequences = room, sequences
        try:
            self._context = llama.LlamaContext(model=model, params=params, verbose=False)
            self._batch = llama.LlamaBatch(
                n_tokens=_MOST_TOGETHER, embd=0, n_seq_max=1, verbose=False
            )
        except Exception as error:
            raise LlamaCppError(
                f"llama.cpp has no memory for {sequences} answers of {room} tokens: {error}"
            ) from error

    def decode(self, parts: Sequence[Part]) -> list[npt.NDArray[np.float32]]:
        """Compute parts together; return the logits of each. It refuses more than 512 tokens."""
        ends = list(accumulate((len(part.tokens) for part in parts), initial=0))
        if ends[-1] > _MOST_TOGETHER:
            raise LlamaCppError(f"a step has {ends[-1]} tokens, more than {_MOST_TOGETHER}")
        self._batch.reset()
        for part in parts:
            for at, token in enumerate(part.tokens, part.begin):
                self._batch.add(int(token), at, [part.sequence], True)
        try:
            self._context.decode(self._batch)
        except Exception as error:
            raise LlamaCppError(f"a step of llama.cpp failed: {error}") from error
        logits = (array("f", self._context.get_logits_ith(at)) for at in range(ends[-1]))
        rows = [np.frombuffer(each, np.float32) for each in logits]
        return [np.stack(rows[at:to]) for at, to in pairwise(ends)]

    def state(self, sequence: int) -> bytes:
        """Return a sequence's rows."""
        return bytes(self._context.get_state_seq_data(sequence))

    def restore(self, sequence: int, blob: bytes) -> None:
        """Replace a sequence's rows; after an error there are none."""
        self.remove(sequence, 0)
        try:
            self._context.set_state_seq_data(blob, sequence)
        except Exception as error:
            self.remove(sequence, 0)
            raise LlamaCppError(f"llama.cpp refused the prompt's rows: {error}") from error

    def remove(self, sequence: int, begin: int) -> None:
        """Remove a sequence's rows from a position on."""
        self._context.memory_seq_rm(sequence, begin, -1)

    def close(self) -> None:
        """Release the memory."""
        self._batch.close()
        self._context.close()
