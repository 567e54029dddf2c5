"""CacheClip's scores with windows of 8 ranked by their mean score, to the exact budget.

The paper's windows (``cacheclip``) recompute only where most of a window was chosen.
"""

from dataclasses import replace

from ragkv.config import Grouping
from ragkv.select.rules import cacheclip

METHOD = replace(
    cacheclip.METHOD,
    name="cacheclip_fill",
    source="ragkv; after CacheClip, arXiv 2510.10129",
    grouping=Grouping(window=8, mode="fill"),
)
