"""A knowledge tree: KV of former prompts and answers, by their tokens (RAGCache)."""
