"""What goes wrong in measuring alone."""

from __future__ import annotations

from ragkv.errors import RagKVError


class PeerError(RagKVError, RuntimeError):
    """Another engine, measured beside ragkv, did not start or gave no token."""
