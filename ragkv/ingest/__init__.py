"""Ingestion: the corpus of chunks, encoding, documents."""
