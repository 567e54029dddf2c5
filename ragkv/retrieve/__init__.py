"""Retrieval in stages, computed on while it goes on; and which chunks are similar."""
