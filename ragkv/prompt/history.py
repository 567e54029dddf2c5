"""The tokens of a prompt and its answer, and earlier occurrences of the last tokens.

Answers copy from retrieved text. The tokens after an earlier occurrence of the last ones are a
likely continuation: prompt lookup decoding drafts them, and copy repair recomputes stale ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ragkv.prompt.tokens import IntArray

Positions = npt.NDArray[np.int64]
LONGEST_MATCH = 8
"""Longer matches count as this long."""
_ROOM = 512


class TokenHistory:
    """The tokens of one prompt and its answer, in one growing array.

    Parameters
    ----------
    prompt
        ``[tokens]`` the prompt's token ids.
    """

    def __init__(self, prompt: IntArray) -> None:
        self.prompt_tokens = len(prompt)
        self._length = len(prompt)
        self._found: tuple[Positions, Positions] | None = None
        self._ids = np.concatenate([prompt, np.zeros(_ROOM, dtype=prompt.dtype)])

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> IntArray:
        """``[tokens]`` all token ids; valid until more are appended."""
        return self._ids[: self._length]

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens of the answer."""
        end = self._length + len(tokens)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(end, dtype=self._ids.dtype)])
        self._ids[self._length : end] = tokens
        self._length, self._found = end, None

    def truncate(self, length: int) -> None:
        """Remove the answer's tokens from position ``length`` on."""
        self._length, self._found = max(self.prompt_tokens, min(length, self._length)), None

    def occurrences(self) -> tuple[Positions, Positions]:
        """Return the earlier positions of the last token, and the length of each match.

        Returns
        -------
        positions, lengths
            ``[matches]`` int64, ascending positions: the token there and the ``lengths - 1``
            before it are the last ones. Lengths are 1 to :data:`LONGEST_MATCH`.
        """
        if self._found is None:
            self._found = self._occurrences()
        return self._found

    def _occurrences(self) -> tuple[Positions, Positions]:
        ids = self.ids
        tail = ids[-LONGEST_MATCH:]
        at = np.flatnonzero(ids[:-1] == tail[-1])
        alike = np.ones(len(at), dtype=bool)
        lengths = np.zeros(len(at), dtype=np.int64)
        for back in range(len(tail)):
            alike &= (at >= back) & (ids[at - back] == tail[-1 - back])
            if not alike.any():
                break
            lengths += alike
        return at, lengths
