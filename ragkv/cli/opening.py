"""Open an engine while the reader sees what is being waited for."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Literal

from ragkv.cli.console import err

if TYPE_CHECKING:
    from ragkv import RagKV, ReuseConfig


def open_engine(
    model: str | None,
    *,
    store: str | None,
    namespace: str,
    codec: str = "raw",
    encrypt: bool = False,
    reuse: ReuseConfig | None = None,
    on_unsupported: Literal["raise", "full"] = "raise",
    device: str | None = None,
    dtype: str | None = None,
) -> RagKV:
    """Load the model behind a status line that says what takes the time.

    Raises
    ------
    RagKVError
        The model cannot be found or is not supported, or the store cannot be opened.
    """
    start = time.perf_counter()
    name = model or "the embedded SmolLM2-135M-Instruct (the first time it is converted, once)"
    with err.status(f"Loading {name} …"):
        from ragkv import RagKV, ReuseConfig, StoreConfig

        _quiet()
        kv = RagKV(
            model,
            store=StoreConfig(store, codec=codec, encrypt=encrypt),
            namespace=namespace,
            reuse=reuse or ReuseConfig(),
            on_unsupported=on_unsupported,
            device=device,
            dtype=dtype,
        )
    err.print(f"Loaded {kv.model_name} in {time.perf_counter() - start:.1f} s.", highlight=False)
    return kv


def _quiet() -> None:
    """Keep transformers' own progress bars and notes off the terminal."""
    from transformers.utils import logging as notes

    notes.disable_progress_bar()  # type: ignore[no-untyped-call]
    notes.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)
