"""Choose: which cached tokens are computed again. One rule a file in ``rules/``."""

from ragkv.select.method import Method, Scene, Sparse, Spread, get_method, method_names, method_of

__all__ = ["Method", "Scene", "Sparse", "Spread", "get_method", "method_names", "method_of"]
