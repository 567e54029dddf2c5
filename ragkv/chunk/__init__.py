"""Encode at ingestion: each chunk alone, behind the sink, in batches."""
