"""Polynomial hashes of all windows of a text at once, modulo 2**64.

Rabin-Karp fingerprints (Karp and Rabin, 1987) in NumPy: a window's hash is
``sum(code_point[k] * BASE**(width - 1 - k))`` with unsigned wrap-around. They only
exclude places that cannot match; callers compare the texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15  # odd, so no window's first character is multiplied away
_MODULUS = 1 << 64
_BLOCK = 8192


def code_points(text: str) -> Codes:
    """Return the text's code points ``[characters]``; lone surrogates are kept."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def window_hashes(codes: Codes, width: int) -> Hashes:
    """Return the hash of every window of ``width`` characters, by its first character.

    The result is ``[characters - width + 1]``, or empty if the text is shorter. It
    takes O(log width) passes: windows of 1, 2, 4, ... characters are joined.
    """
    count = len(codes) - width + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    window, size, done = codes.astype(np.uint64), 1, 0
    while done < width:
        if width & size:
            hashes = hashes * _power(size) + window[done : done + count]
            done += size
        if done < width:
            window = window[:-size] * _power(size) + window[size:]
            size *= 2
    return hashes


def head_hashes(texts: Sequence[str], width: int) -> Hashes:
    """Return the hash of the first ``width`` characters of each text, ``[texts]``.

    Every text must have at least ``width`` characters.
    """
    weights = np.array([pow(_BASE, width - 1 - k, _MODULUS) for k in range(width)], np.uint64)
    hashes = np.empty(len(texts), np.uint64)
    for first in range(0, len(texts), _BLOCK):
        block = texts[first : first + _BLOCK]
        codes = code_points("".join(text[:width] for text in block)).reshape(-1, width)
        hashes[first : first + len(block)] = codes.astype(np.uint64) @ weights
    return hashes


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(_BASE, exponent, _MODULUS))
