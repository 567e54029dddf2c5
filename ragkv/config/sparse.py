"""Settings of sparse decoding."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.config.checks import check_whole


@dataclass(frozen=True, slots=True)
class SparseDecoding:
    """Decoding steps read only some blocks of the context, in layers without a window.

    The context is an initial window, a middle of whole blocks of 16 tokens, and a local window.
    Steps always read both windows. Of the middle, each KV head reads the blocks whose keys match
    the queries best, by the bound of Quest (arXiv 2406.10774), the same for all rows of a step;
    every second step chooses anew. A context without further blocks is read whole, and so is any
    context in a step that recomputes some of it. The names are those of KTransformers.

    Parameters
    ----------
    second_block_count
        Blocks of the middle that a step reads, at least 1.
    initial_window, local_window
        Tokens at the context's beginning, and before a step's first row, that are always read.
    """

    second_block_count: int = 64
    initial_window: int = 64
    local_window: int = 256

    def __post_init__(self) -> None:
        check_whole("second_block_count", self.second_block_count, 1, 2**31)
        for name in ("initial_window", "local_window"):
            check_whole(name, getattr(self, name), 0, 2**31)
