"""The engine: RagKV, and the pipeline that a prompt runs through."""
