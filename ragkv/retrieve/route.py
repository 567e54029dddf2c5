"""The routing key of a request: of replicas behind a proxy, each keeps its own chunks warm."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

HEADER = "X-RagKV-Route"
"""The header of requests and responses that a proxy routes by."""

_BYTES = 8


def route_of(texts: Iterable[str]) -> str:
    """Return the key under which a proxy finds the replica where these chunks are warm.

    The highest hash of a chunk (min-wise hashing, Broder 1997): it depends on no order, and sets of
    chunks have the same key with the probability of their Jaccard similarity.

    Returns
    -------
    str
        16 hexadecimal digits; empty for no texts.
    """
    given = (text.strip().encode("utf-8", "surrogatepass") for text in texts)
    return max((blake3(text).hexdigest(length=_BYTES) for text in given), default="")
