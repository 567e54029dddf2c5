"""A knowledge tree: rows that former prompts computed, by their tokens (RAGCache)."""
