"""Encoding of chunks, each directly behind the sink, in batches."""
