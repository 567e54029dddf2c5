"""Choose: which cached tokens are computed again. One rule a file in ``rules/``."""

from ragkv.attend.sparse import Sparse
from ragkv.select.method import (
    CopyLookup,
    Focus,
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
    "Focus",
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
