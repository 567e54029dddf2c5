"""Benchmarks: time to first token beside full prefill, the arithmetic bound and peers."""
