"""Selection of the cached tokens to recompute. Each file in ``rules/`` has one method."""

from ragkv.attend.sparse_rows import Sparse
from ragkv.select.method import (
    CopyLookup,
    Grouping,
    Method,
    Scene,
    Scored,
    Spread,
    get_method,
    method_names,
    method_of,
)

__all__ = [
    "CopyLookup",
    "Grouping",
    "Method",
    "Scene",
    "Scored",
    "Sparse",
    "Spread",
    "get_method",
    "method_names",
    "method_of",
]
