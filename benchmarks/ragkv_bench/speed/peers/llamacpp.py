"""llama.cpp, in this process (package ``xllamacpp``): a full prefill of every prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from ragkv.errors import ConfigError, MissingDependencyError
from ragkv_bench.errors import PeerError

_SPARE = 64
_SILENT = 0


class LlamaCpp:
    """llama.cpp's server without its network.

    ``model`` is a GGUF file: raises ConfigError where there is none, MissingDependencyError
    without ``xllamacpp``. Prompt and answer together have at most ``max_tokens``. ``slots`` draw
    answers at once and keep their prompts; 0: one answer at a time, every prompt computed anew.
    """

    name = "llama.cpp"

    def __init__(self, model: Path, *, max_tokens: int, threads: int, slots: int = 0) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise MissingDependencyError(
                "the peer llama.cpp needs xllamacpp: pip install 'ragkv-bench[peers]'"
            ) from error
        if not model.is_file():
            raise ConfigError(f"there is no GGUF file {model}")
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_parallel = max(1, slots)
        params.n_ctx = params.n_parallel * (max_tokens + _SPARE)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_prompt = self._keeps_prompts = slots > 0
        params.fit_params = False
        params.cache_ram_mib = 0
        params.verbosity = _SILENT
        self.build: str = xllamacpp.get_system_info().strip(" |")
        self._open: Callable[[], Any] = lambda: xllamacpp.Server(params)
        self._server: Any = None

    def __enter__(self) -> Self:
        try:
            self._server = self._open()
        except RuntimeError as error:
            raise PeerError(f"llama.cpp cannot load the model: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._server = None

    def answer(self, ids: Sequence[int], tokens: int) -> tuple[float, float]:
        """See :class:`ragkv_bench.speed.peers.base.Peer`."""
        token_times: list[float] = []
        other: list[object] = []

        def on_piece(piece: dict[str, Any]) -> bool:
            if "choices" in piece:
                token_times.append(time.perf_counter())
            else:
                other.append(piece)
            return False

        request = {
            "prompt": list(ids),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": self._keeps_prompts,
            "stream": True,
        }
        started = time.perf_counter()
        self._server.handle_completions(request, on_piece)
        if not token_times:
            raise PeerError(f"llama.cpp gave no token: {other}")
        return token_times[0] - started, time.perf_counter() - started
