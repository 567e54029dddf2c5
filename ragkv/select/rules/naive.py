"""Chunks encoded alone, without a sink, re-positioned, nothing recomputed."""

from ragkv.select.method import Method

METHOD = Method("naive", source="PromptCache-like baseline in CacheBlend and EPIC", sink=False)
