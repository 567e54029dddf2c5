"""Contextual versions of chunks: their KV as it is behind other chunks (Cache-Craft)."""
