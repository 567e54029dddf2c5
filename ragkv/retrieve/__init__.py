"""Retrieval in stages, whose guesses are computed on while it goes on."""
