"""One layer of an entry at a time, from any place that can be read in ranges."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.tokens import IntArray
from ragkv.store.format import check_wanted, decode_layer, tokens_in
from ragkv.store.header import DTYPES, RefusedEntryError, read_header

Read = Callable[[int, int], bytes]
"""``read(start, length)``: bytes of the file, fewer at its end."""

_FIRST_READ = 1 << 14  # most headers are shorter


class LayeredEntry:
    """An entry whose layers are read and verified alone, in any order.

    Parameters
    ----------
    read
        The file's bytes.
    size
        How many there are.
    text, fingerprint
        What the entry must be of.

    Raises
    ------
    RefusedEntryError
        From every method: what was read is no such entry; ``reason`` as in
        :class:`ragkv.store.base.Lookup`.
    """

    def __init__(self, read: Read, size: int, text: str, fingerprint: Fingerprint) -> None:
        first = read(0, _FIRST_READ)
        end = int.from_bytes(first[:8], "little") + 8
        if _FIRST_READ < end <= size:
            first += read(len(first), end - len(first))
        self._read = read
        self.header, self._start = read_header(memoryview(first), size)
        check_wanted(self.header, text, fingerprint)

    def layer(
        self, index: int, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, ``[kv_heads, tokens, head_dim]`` each."""
        header = self.header
        out = torch.empty(header.shape[1:], dtype=DTYPES[header.dtype], device=device)
        decode_layer(memoryview(self._range(header.spans[index])), header, index, out)
        return out[0], out[1]

    def tokens(self) -> tuple[IntArray, IntArray]:
        """Return ``token_ids`` and ``offsets`` as in :class:`ragkv.chunk.kv.ChunkKV`."""
        behind = slice(self.header.kv_bytes, self.header.data_bytes)
        return tokens_in(self._range(behind), self.header)

    def _range(self, span: slice) -> bytes:
        found = self._read(self._start + span.start, span.stop - span.start)
        if len(found) != span.stop - span.start:
            raise RefusedEntryError("unreadable", "the file has become shorter")
        return found
