"""Adaptive Parallel Encoding: chunks overlap, and the query's attention to them is sharpened.

All chunks begin where the sink ends, and the query where the longest of them ends. Temperature
and scale are the user's choice; both are 0.9 here. Nothing is recomputed below ratio 1.
"""

from ragkv.select.method import Method
from ragkv.splice.overlap import Parallel

METHOD = Method(
    "ape",
    source="APE, arXiv 2502.05431",
    parallel=Parallel(temperature=0.9, scale=0.9),
)
