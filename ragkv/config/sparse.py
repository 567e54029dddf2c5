"""Which blocks of a long context decoding steps read."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.config.checks import check_choice, check_whole

REPRESENTATIVES = ("quest", "meanstd")


@dataclass(frozen=True, slots=True)
class SparseDecoding:
    """In decoding steps, layers without a window read some blocks of the context alone.

    The context is an initial window, a middle of whole blocks, and a local window. Both windows
    are always read; of the middle, each KV head reads the blocks that match a step's queries
    best, the same for all rows of a step. A context that has no other blocks, and in a step that
    recomputes some of it, is read whole. The names are those of KTransformers.

    Parameters
    ----------
    block_size
        Tokens of a block.
    representative
        What stands for a block's keys: ``"quest"``, minimum and maximum by channel
        (arXiv 2406.10774), or ``"meanstd"``, mean and variance.
    second_block_count
        Blocks of the middle that a step reads.
    token_step
        Blocks are chosen anew once in so many steps.
    initial_window, local_window
        Tokens at the context's beginning, and before a step's first row, that are always read.
    """

    block_size: int = 16
    representative: str = "quest"
    second_block_count: int = 64
    token_step: int = 2
    initial_window: int = 64
    local_window: int = 256

    def __post_init__(self) -> None:
        check_choice("representative", self.representative, REPRESENTATIVES)
        for name in ("block_size", "second_block_count", "token_step"):
            check_whole(name, getattr(self, name), 1, 2**31)
        for name in ("initial_window", "local_window"):
            check_whole(name, getattr(self, name), 0, 2**31)
