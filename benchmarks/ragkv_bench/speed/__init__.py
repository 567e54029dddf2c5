"""Benchmarks: time to first token against full prefill, the arithmetic bound and peers."""
