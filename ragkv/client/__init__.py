"""The client of ``ragkv serve``, over the ``openai`` package. It loads no model, and no torch."""

from ragkv.client.remote import KEY_VARIABLE, TIMEOUT_S, RemoteRagKV

__all__ = ["KEY_VARIABLE", "TIMEOUT_S", "RemoteRagKV"]
