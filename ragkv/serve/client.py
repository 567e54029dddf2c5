"""RemoteRagKV: a ``ragkv serve`` with the methods of an engine in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

import httpx

from ragkv.config import DecodeConfig, ReuseConfig
from ragkv.errors import ConfigError, ServerError
from ragkv.prompt.chat import prompt_of
from ragkv.report.account import PrecomputeReport
from ragkv.retrieve.named import NamedChunks
from ragkv.serve.remote.answer import (
    Events,
    Prompt,
    body_of,
    contains,
    path_of,
    reuse_fields,
    tokens_of,
)
from ragkv.serve.remote.chunks import Chunks
from ragkv.serve.remote.connection import Connection, within
from ragkv.serve.remote.stream import OnText, RemoteStream

if TYPE_CHECKING:
    from ragkv.answer.completion import Completion

__all__ = ["KEY_VARIABLE", "TIMEOUT_S", "RemoteRagKV", "RemoteStream"]

KEY_VARIABLE = "RAGKV_API_KEY"
"""Environment variable of the key, where none is given."""

TIMEOUT_S = 600.0
"""Seconds that a request may take, where nothing else is said."""

_LOCAL = {
    "tokenizer": "count with tokenize(text)",
    "model": "load the model here with RagKV(...)",
    "loaded": "load the model here with RagKV(...)",
    "prefill": "ask with generate(...), or load the model here with RagKV(...)",
    "speculate": "name the chunks with prefetch(...), or load the model here with RagKV(...)",
    "follow": "name the chunks with prefetch(...), or load the model here with RagKV(...)",
    "afollow": "name the chunks with prefetch(...), or load the model here with RagKV(...)",
    "turn": "the server orders its requests itself",
}
"""What an engine in this process has, and what to do instead."""


class RemoteRagKV:
    """A server of ragkv, asked over HTTP; it takes an engine's place in the wrappers.

    Threads and tasks may share one. The model, its store and the sink are the server's, and so
    are all settings that are not given here.

    Parameters
    ----------
    base_url
        The server's address, such as ``http://gpu:8000``; ``/v1`` may stand behind it.
    api_key
        The key of a namespace; None is the environment variable ``RAGKV_API_KEY``, if it is set.
    timeout
        Seconds after which an answer (and any other request) is given up; None is never.
    max_retries
        How often a request is sent again where no connection comes about or the server is busy.
    model
        Name of the model that the server must have; None is whichever it has.
    reuse
        What differs from ReuseConfig's defaults goes with every request.
    transport
        Replaces the network: an httpx transport.

    Raises
    ------
    ConfigError
        The address or the key has a wrong form.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        timeout: float | None = TIMEOUT_S,
        max_retries: int = 2,
        model: str | None = None,
        reuse: ReuseConfig = ReuseConfig(),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = address_of(base_url)
        self.reuse = reuse
        self._model = model
        key = os.environ.get(KEY_VARIABLE) if api_key is None else api_key
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("api_key must be printable ASCII characters")
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"timeout must be more than 0 seconds, not {timeout!r}")
        if max_retries < 0:
            raise ConfigError(f"max_retries must be 0 or more, not {max_retries!r}")
        self._connection = Connection(self.base_url, key, timeout, max_retries, transport)
        self._chunks = Chunks(self._connection)
        self._named = NamedChunks()
        self._asking = threading.Lock()
        self._version: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"RemoteRagKV({self.base_url!r})"

    # ---- ingestion

    def precompute(
        self,
        texts: Iterable[str],
        *,
        document: str | None = None,
        revision: str | None = None,
        expires_in: float | None = None,
        show_progress: bool | None = False,
        **overrides: Any,
    ) -> PrecomputeReport:
        """Have chunks encoded, as :meth:`ragkv.RagKV.precompute`; return when they are.

        Raises
        ------
        StoreFullError, ServerError, ConfigError
        """
        return self._chunks.precompute(
            texts,
            {
                "document": document,
                "revision": revision,
                "expires_in": expires_in,
                "ragkv": reuse_fields(self.reuse, overrides),
            },
            show_progress=show_progress,
        )

    def contains(self, text: str, **overrides: Any) -> bool:
        """Whether the server can reuse the chunk, behind this sink."""
        return self._chunks.contains(text, reuse_fields(self.reuse, overrides))

    def forget(self, text: str) -> bool:
        """Delete a chunk; return whether it was there."""
        return self._chunks.delete({"text": text}) > 0

    def forget_document(self, document: str) -> int:
        """Delete the chunks that belong to this document alone; return how many."""
        return self._chunks.delete({"document": document})

    def prefetch(self, texts: Sequence[str], **overrides: Any) -> None:
        """Name the chunks that were retrieved: the server starts loading them."""
        self._chunks.prefetch(texts, reuse_fields(self.reuse, overrides))
        self._named.add(text.strip() for text in texts)

    def wait(self) -> None:
        """Return at once: :meth:`precompute` has waited, and the rest is the server's work."""

    # ---- answering

    def generate(self, prompt: Prompt, **settings: Any) -> Completion:
        """Answer a prompt; ``settings`` are those of :meth:`stream`."""
        with self.stream(prompt, **settings) as stream:
            for _ in stream:
                pass
            return stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        top_k: int = 0,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        json_schema: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        prompt_lookup_num_tokens: int | None = None,
        logprobs: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        retrieved: Sequence[str] = (),
        **overrides: Any,
    ) -> RemoteStream:
        """Answer a prompt piece by piece: a text, or chat messages.

        The settings are those of :class:`ragkv.DecodeConfig`, without
        ``prompt_lookup_num_tokens``, and of ``generation`` those that a server takes:
        ``repetition_penalty`` and ``min_p``; ``logprobs`` are for chat messages alone. ``timeout``
        takes the client's place, ``chat_template_kwargs`` are variables of the chat template, and
        ``overrides`` fields of :class:`ragkv.ReuseConfig`. The report accounts
        for each of the ``retrieved`` chunks, and those that :meth:`prefetch` named.

        Raises
        ------
        ConfigError
            A setting is wrong. What the server says comes from the stream.
        """
        decode = DecodeConfig(
            *(max_new_tokens, temperature, top_p, stop, seed, top_k, stop_token_ids),
            prompt_lookup_num_tokens,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            json_schema=json_schema,
            generation=generation,
        )
        reuse = reuse_fields(self.reuse, overrides)
        asked = prompt_of(prompt, chat_template_kwargs)
        body = body_of(asked, decode, reuse, self._model or "default")
        named = self._named.claim(self._named.take(), partial(contains, asked))
        if texts := list(dict.fromkeys((*retrieved, *named))):
            body["ragkv"]["retrieved"] = texts
        limit = self._connection.timeout if timeout is None else timeout
        answer = partial(_answer, self._connection, path_of(asked), body, limit)
        return RemoteStream(self._connection.submit, answer)

    # ---- what is known of the server

    def sink_from(
        self,
        template: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a prompt template's text before its first field, as the model reads it."""
        given = template if isinstance(template, str) else [dict(each) for each in template]
        body: dict[str, Any] = {"template": given, "tools": list(tools)}
        if chat_template_kwargs:
            body["chat_template_kwargs"] = dict(chat_template_kwargs)
        return str(self._connection.call("POST", "/v1/sink", json=body)["sink"])

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens by the model's own tokenizer, without special tokens."""
        return self._connection.submit(tokens_of(self._connection, text)).result()

    @property
    def version(self) -> Mapping[str, Any]:
        """What the server says of itself, asked once.

        Raises
        ------
        ServerError
            It cannot be reached, refuses the key, or is no server of ragkv.
        """
        with self._asking:
            if self._version is None:
                found = self._connection.call("GET", "/version")
                missing = {"model", "namespace", "fingerprint", "positions"} - found.keys()
                if missing:
                    raise ServerError(
                        f"{self.base_url}/version has no {', '.join(sorted(missing))}: is it "
                        "`ragkv serve`, of this version?"
                    )
                self._version = found
            return self._version

    @property
    def model_name(self) -> str:
        """What the server calls its model."""
        return str(self.version["model"])

    @property
    def namespace(self) -> str:
        """The namespace that the key opens."""
        return str(self.version["namespace"])

    @property
    def fingerprint(self) -> str | None:
        """Digest of everything that chunk caches depend on; None where they cannot be reused."""
        found = self.version["fingerprint"]
        return None if found is None else str(found)

    @property
    def positions(self) -> int | None:
        """Positions that the model knows; None for any number."""
        found = self.version["positions"]
        return None if found is None else int(found)

    @property
    def supported(self) -> bool:
        """Whether chunks can be reused with the server's model."""
        return bool(self.version.get("supported", True))

    def __getattr__(self, name: str) -> NoReturn:
        if name in _LOCAL:
            raise ConfigError(f"{name}: the model runs in {self.base_url}; {_LOCAL[name]}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a RemoteRagKV has connections and a key: make one in each process")

    def close(self) -> None:
        """End the answers under way and close the connections; later calls raise ClosedError."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def address_of(base_url: str) -> str:
    """Return a server's address without ``/v1`` and a slash at its end.

    Raises
    ------
    ConfigError
        It is no http address, or has a password in it.
    """
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError(
            f"base_url must be an address such as http://host:8000: {error}"
        ) from None
    if url.userinfo:
        raise ConfigError("base_url has a password in it: give api_key=... instead")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigError(f"base_url must be an address such as http://host:8000, not {base_url!r}")
    return str(url).rstrip("/").removesuffix("/v1").rstrip("/")


async def _answer(
    connection: Connection, path: str, body: dict[str, Any], limit: float | None, on_text: OnText
) -> Completion:
    events = Events(connection.address)
    async with within(limit, connection.address):
        async with connection.events(path, body) as arriving:
            async for event in arriving:
                on_text(events.feed(event))
        if not events.token_ids and events.text:
            events.token_ids = await tokens_of(connection, events.text)
    return events.completion()
