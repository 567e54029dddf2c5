"""Only an exact token prefix is reused, the rest is prefilled: what vLLM and SGLang do.

Of what ragkv stores, that is the sink and, right behind it, the prompt's first chunk.
"""

from ragkv.select.method import Method

METHOD = Method("prefix", reuse="prefix")
