"""RemoteRagKV: a ``ragkv serve`` with the methods of a local engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn, Self

import httpx

from ragkv.answer.completion import Completion
from ragkv.answer.engine import ModelInfo
from ragkv.client.body import Prompt, body_of, contains, reuse_fields
from ragkv.client.stream import AnswerEvents, RemoteStream
from ragkv.config import DECODE_SETTINGS, DecodeConfig, ReuseConfig
from ragkv.errors import ConfigError, MissingDependencyError, ServerError, install_command
from ragkv.prompt.chat import Chat, prompt_of
from ragkv.report.account import PrecomputeReport
from ragkv.report.ingestion_progress import IngestionProgress
from ragkv.retrieve.named import NamedChunks
from ragkv.retrieve.route import HEADER, route_of

KEY_VARIABLE = "RAGKV_API_KEY"
"""Environment variable with the default key."""

TIMEOUT_S = 600.0
"""Default time limit of a request, in seconds."""

_CHUNKS = "/v1/chunks"
_BATCH_CHUNKS, _BATCH_CHARS = 32, 1 << 20
"""Most chunks of a request, which many proxies break off after a minute, and their characters."""
_LOCAL = {
    "tokenizer": "count with tokenize(text)",
    "loaded": "load the model here with RagKV(...)",
    "render": "the server has the chat template: give the messages to generate(...), or a "
    "messages_to_prompt to RagKVLLM",
    "prefill": "call generate(...), or load the model here with RagKV(...)",
    "turn": "the server schedules its requests",
}
"""Members of a local engine, and their replacements."""


class RemoteRagKV:
    """A ragkv server over HTTP; it replaces a local engine in the wrappers.

    Threads and tasks can share one. The model, the store, the sink and all settings that are not
    given here are the server's.

    Parameters
    ----------
    base_url
        The server's address, such as ``http://gpu:8000``, with or without ``/v1``.
    api_key
        The key of a namespace; None reads the environment variable ``RAGKV_API_KEY``, if set.
    timeout
        Time limit of an answer, and of any other request, in seconds; None for no limit.
    max_retries
        Repetitions of a request after a failed connection or a busy server, with the pauses of the
        ``openai`` package.
    model
        Name that the server's model must have; None accepts any.
    reuse
        Its differences from ReuseConfig's defaults are sent with every request.
    transport
        An httpx transport that replaces the network.

    Raises
    ------
    ConfigError
        The address or the key has a wrong form.
    MissingDependencyError
        The ``openai`` package is not installed.
    """

    if TYPE_CHECKING:  # refused by name
        render: Callable[..., str]

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
        try:
            from ragkv.client.connection import Connection
        except ModuleNotFoundError as missing:
            raise MissingDependencyError(
                f"RemoteRagKV needs {missing.name}: {install_command('client')}"
            ) from missing
        self._connection = Connection(self.base_url, key, timeout, max_retries, transport)
        self._named = NamedChunks()
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
        neighbours: bool = False,
        show_progress: bool | None = False,
        **overrides: Any,
    ) -> PrecomputeReport:
        """Encode chunks, as :meth:`ragkv.RagKV.precompute`; return when they are stored.

        Raises
        ------
        StoreFullError, ServerError, ConfigError
        """
        reuse = reuse_fields(self.reuse, overrides) or None
        given = _given(expires_in=expires_in, ragkv=reuse)
        chunks = _checked(texts)
        total = PrecomputeReport()
        with IngestionProgress(list(map(len, chunks)), show=show_progress) as progress:
            for batch in _batches(chunks):
                total += self._precompute(batch, neighbours=neighbours, **given)
                for text in batch:
                    progress.stored(len(text))
                progress.say_left()
            if document is not None:  # all chunks are stored: assign them to it
                named = _given(document=document, revision=revision, **given)
                last = self._precompute(chunks, **named)
                total += PrecomputeReport(seconds=last.seconds, removed=last.removed)
            return progress.end(total)

    def _precompute(self, texts: list[str], **given: Any) -> PrecomputeReport:
        found = self._send("post", _CHUNKS, {"texts": texts, **given}, chunks=texts)
        return PrecomputeReport.from_dict(found["report"])

    def contains(self, text: str, **overrides: Any) -> bool:
        """Whether the server can reuse the chunk behind this sink."""
        reuse = reuse_fields(self.reuse, overrides)
        params = {"text": text}
        params |= {name: str(reuse[name]) for name in ("sink", "method") if name in reuse}
        return bool(self._send("get", _CHUNKS, params=params)["text_known"])

    def forget(self, text: str | None = None, *, document: str | None = None) -> int:
        """Delete a chunk or a document's own chunks; return their number."""
        body = _given(text=text, document=document)
        if len(body) != 1:
            raise ConfigError("forget takes either a chunk's text or document=...")
        return int(self._send("delete", _CHUNKS, body)["deleted"])

    def prefetch(
        self, texts: Sequence[str], *, for_next_answer: bool = True, **overrides: Any
    ) -> None:
        """Name retrieved chunks; the server loads them in the background.

        The next answer's report accounts for each, unless ``for_next_answer`` is False.
        """
        chunks = _checked(texts)
        body = _given(texts=chunks, ragkv=reuse_fields(self.reuse, overrides) or None)
        self._send("post", f"{_CHUNKS}/prefetch", body, chunks=chunks)
        if for_next_answer:
            self._named.add(text.strip() for text in chunks)

    def wait(self) -> None:
        """Return immediately: :meth:`precompute` waits, and other work is the server's."""

    def warm_up(self) -> None:
        """Return immediately: a server is ready only after its warm-up."""

    # ---- answering

    def generate(self, prompt: Prompt, **settings: Any) -> Completion:
        """Answer a prompt; ``settings`` are those of :meth:`stream`."""
        return self.stream(prompt, **settings).whole()

    def stream(
        self,
        prompt: Prompt,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        retrieved: Sequence[str] = (),
        **settings: Any,
    ) -> RemoteStream:
        """Answer a text or chat messages piece by piece.

        ``settings`` are fields of :class:`ragkv.ReuseConfig` and of
        :class:`ragkv.DecodeConfig`, except ``drafts``; ``generation`` can have
        ``repetition_penalty`` and ``min_p``, and ``logprobs`` needs chat messages. ``timeout``
        replaces the client's. The report accounts for each of the ``retrieved`` chunks and of
        those named by :meth:`prefetch`.

        Raises
        ------
        ConfigError
            A setting is wrong. The server's errors are raised by the stream.
        """
        decode = {name: settings.pop(name) for name in DECODE_SETTINGS if name in settings}
        checked = prompt_of(prompt, chat_template_kwargs)
        body = body_of(
            checked,
            DecodeConfig(**decode),
            reuse_fields(self.reuse, settings),
            self._model or "default",
        )
        named = self._named.take()
        earlier = (text for text in named.earlier if contains(checked, text))
        if texts := list(dict.fromkeys((*retrieved, *named.new, *earlier))):
            body["ragkv"]["retrieved"] = texts
        path = "/v1/chat/completions" if isinstance(checked, Chat) else "/v1/completions"

        async def answer(on_text: Callable[[str], None]) -> Completion:
            collected, headers = AnswerEvents(), _route(texts)
            async with aclosing(self._connection.events(path, body, headers)) as events:
                async for event in events:
                    on_text(collected.feed(event))
            return collected.completion()

        stream = RemoteStream(lambda on_text: self._connection.submit(answer(on_text)))
        return stream.within(self._connection.timeout if timeout is None else timeout)

    # ---- the server's model

    def sink_from(
        self,
        template: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a prompt template's text before its first field, as the model reads it."""
        given = template if isinstance(template, str) else [dict(each) for each in template]
        variables = dict(chat_template_kwargs or {})
        body = {"template": given, "tools": list(tools), "chat_template_kwargs": variables}
        return str(self._send("post", "/v1/sink", body)["sink"])

    def tokenize(self, text: str) -> list[int]:
        """Return the text's token ids, without special tokens."""
        body = {"prompt": text, "add_special_tokens": False}
        return list(map(int, self._send("post", "/tokenize", body)["tokens"]))

    @property
    def version(self) -> Mapping[str, Any]:
        """The server's description of itself, requested once.

        Raises
        ------
        ServerError
            The server cannot be reached, refuses the key, or is not `ragkv serve`.
        """
        return self._version or self._read_version()

    @property
    def namespace(self) -> str:
        """The namespace of the key."""
        return str(self.version["namespace"])

    @property
    def info(self) -> ModelInfo:
        """The server's model."""
        found = self.version
        why = "" if found.get("supported", True) else "the server serves it by full prefill"
        return ModelInfo(str(found["model"]), found["fingerprint"], found["positions"], why)

    # ---- requests

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        chunks: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Send a request; ``chunks`` choose its replica."""
        work = self._connection.request(method, path, body, params or {}, _route(chunks))
        return self._connection.call(work)

    def _read_version(self) -> Mapping[str, Any]:
        version = self._send("get", "/version")
        missing = {"model", "namespace", "fingerprint", "positions"} - version.keys()
        if missing:
            raise ServerError(
                f"{self.base_url}/version has no {', '.join(sorted(missing))}: is it "
                "`ragkv serve`, of this version?"
            )
        self._version = version
        return version

    def __getattr__(self, name: str) -> NoReturn:
        if name in _LOCAL:
            raise ConfigError(f"{name}: the model runs in {self.base_url}; {_LOCAL[name]}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a RemoteRagKV has connections and a key: make one in each process")

    def close(self) -> None:
        """Cancel running answers and close the connections; later calls raise ClosedError."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def address_of(base_url: str) -> str:
    """Return a server's address without ``/v1`` and without a slash at its end.

    Raises
    ------
    ConfigError
        It is not an http address, or contains a password.
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


def _route(chunks: Sequence[str]) -> dict[str, str]:
    """Return the header by which a proxy finds the replica with these chunks in memory."""
    return {HEADER: route_of(chunks)} if chunks else {}


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _checked(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ConfigError(f"give the chunk texts in a list, not {type(texts).__name__}")
    return list(texts)


def _batches(texts: list[str]) -> Iterator[list[str]]:
    """Yield texts in lists that fit a request's body."""
    start = length = 0
    for at, text in enumerate(texts):
        if at > start and (at - start == _BATCH_CHUNKS or length + len(text) > _BATCH_CHARS):
            yield texts[start:at]
            start, length = at, 0
        length += len(text)
    if texts:
        yield texts[start:]
