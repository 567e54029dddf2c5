"""``ragkv demo``: one RAG pipeline in each framework, with full prefill and with ragkv."""
