"""Rows of earlier prompts: a radix tree over token ids, and contextual versions of chunks."""
