"""The routing key of a request: of replicas behind a proxy, each keeps its own chunks warm."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

HEADER = "X-RagKV-Route"
"""The header of requests and responses that a proxy routes by."""

_BYTES = 8


def route_of(texts: Iterable[str], namespace: str = "default") -> str:
    """Return the key under which a proxy finds the replica where these chunks are warm.

    The highest of the chunks' rendezvous weights, hashes keyed by the namespace (min-wise hashing,
    Broder 1997): it depends on no order, and sets of chunks have the same key with the
    probability of their Jaccard similarity.

    Returns
    -------
    str
        16 hexadecimal digits; empty for no texts.
    """
    key = blake3(_encoded(namespace)).digest()
    weights = (blake3(_encoded(text.strip()), key=key).hexdigest(length=_BYTES) for text in texts)
    return max(weights, default="")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
