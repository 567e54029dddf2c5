"""Load on a server: one trace for every OpenAI-compatible endpoint (``ragkv bench serve``)."""
