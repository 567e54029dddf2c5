"""Choose: which cached tokens are computed again. One rule a file in ``rules/``."""

from ragkv.attend.sparse import Sparse
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
