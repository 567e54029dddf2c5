"""Which blocks of a long context decoding steps read."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.config.checks import Settings, check_choice, check_whole

REPRESENTATIVES = ("meanstd", "mean", "max", "quest", "fixed", "dynamic")
HEAD_SELECT_MODES = ("separate", "shared")


@dataclass(frozen=True, slots=True)
class SparseDecoding(Settings):
    """In decoding steps, layers without a window read some blocks of the context alone.

    The context is an initial window, a middle of whole blocks, and a local window with all of the
    answer. Both windows are always read; of the middle, the blocks that match a step's queries
    best, all rows of a step together. A context with no other blocks is read whole. The names are
    those of KTransformers.

    Parameters
    ----------
    block_size
        Tokens of a block.
    representative
        What stands for a block's keys: ``meanstd``, ``mean`` or ``max`` by channel, ``quest``
        (maximum and minimum, arXiv 2406.10774), ``fixed`` (every so manieth key), or ``dynamic``
        (the keys that the prompt's last tokens attend to most).
    second_block_count
        Blocks of the middle that are chosen in each step.
    preselect_block_count
        Blocks that are read in all steps: those that the prompt's last tokens attend to most
        (SnapKV, arXiv 2404.14469).
    dense_layer_num
        The first layers that read everything.
    token_step, layer_step
        Blocks are chosen in every so manieth step and layer.
    head_select_mode
        Whether each KV head has blocks of its own (``separate``) or all have the same
        (``shared``).
    initial_window, local_window
        Tokens at the context's beginning, and before the answer's last one, that are always read.
    """

    block_size: int = 64
    representative: str = "meanstd"
    second_block_count: int = 16
    preselect_block_count: int = 0
    dense_layer_num: int = 0
    token_step: int = 1
    layer_step: int = 1
    head_select_mode: str = "separate"
    initial_window: int = 64
    local_window: int = 256

    def __post_init__(self) -> None:
        check_choice("representative", self.representative, REPRESENTATIVES)
        check_choice("head_select_mode", self.head_select_mode, HEAD_SELECT_MODES)
        for name in ("block_size", "token_step", "layer_step", "local_window"):
            check_whole(name, getattr(self, name), 1, 2**31)
        for name in (
            "second_block_count",
            "preselect_block_count",
            "dense_layer_num",
            "initial_window",
        ):
            check_whole(name, getattr(self, name), 0, 2**31)


SPARSE_PRESETS = {
    "quest": SparseDecoding(
        block_size=16, representative="quest", second_block_count=128, dense_layer_num=2
    ),
    "snapkv": SparseDecoding(block_size=1, second_block_count=0, preselect_block_count=2048),
}
"""Settings by name."""
