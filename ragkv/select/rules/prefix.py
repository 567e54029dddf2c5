"""Reuse of only an exact token prefix, as in vLLM and SGLang.

In ragkv that is the sink and, directly behind it, the prompt's first chunk.
"""

from ragkv.select.method import Method

METHOD = Method("prefix", reuse="prefix")
