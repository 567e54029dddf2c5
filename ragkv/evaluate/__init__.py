"""Evaluate: quality and speed of every method beside full prefill, with intervals."""

from ragkv.evaluate.data import Chunk, DataError, DataSet, Example, read_data, write_data

__all__ = ["Chunk", "DataError", "DataSet", "Example", "read_data", "write_data"]
