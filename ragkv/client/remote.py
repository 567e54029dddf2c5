"""RemoteRagKV: a ``ragkv serve`` with the methods of an engine in this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import fields
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, Self

import httpx

from ragkv.answer.completion import Completion
from ragkv.answer.engine import ModelInfo
from ragkv.client.body import Prompt, body_of, contains, reuse_fields
from ragkv.client.events import Events
from ragkv.client.stream import RemoteStream
from ragkv.config import DECODE_SETTINGS, DecodeConfig, ReuseConfig
from ragkv.errors import ConfigError, MissingDependencyError, ServerError, install_command
from ragkv.prompt.chat import Chat, prompt_of
from ragkv.report.account import PrecomputeReport
from ragkv.report.ingestion_progress import IngestionProgress
from ragkv.retrieve.named import NamedChunks
from ragkv.retrieve.route import HEADER, route_of

KEY_VARIABLE = "RAGKV_API_KEY"
"""Environment variable of the key, where none is given."""

TIMEOUT_S = 600.0
"""Seconds that a request may take, where nothing else is said."""

_CHUNKS = "/v1/chunks"
_BATCH_CHUNKS, _BATCH_CHARS = 512, 1 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_LOCAL = {
    "tokenizer": "count with tokenize(text)",
    "model": "load the model here with RagKV(...)",
    "loaded": "load the model here with RagKV(...)",
    "render": "the server has the chat template: give generate(...) the messages themselves, or "
    "RagKVLLM a messages_to_prompt of your own",
    "prefill": "ask with generate(...), or load the model here with RagKV(...)",
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
        How often a request is sent again where no connection comes about or the server is busy,
        after the pauses that the ``openai`` package makes.
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
        given = {"document": document, "revision": revision, "expires_in": expires_in}
        fixed: dict[str, Any] = {name: each for name, each in given.items() if each is not None}
        if reuse := reuse_fields(self.reuse, overrides):
            fixed["ragkv"] = reuse
        chunks = _checked(texts)
        total = PrecomputeReport()
        with IngestionProgress(list(map(len, chunks)), show=show_progress) as progress:
            for batch in [chunks] if document is not None else _batches(chunks):
                made = self._job({"texts": batch, "wait": False, **fixed}, progress)
                total = PrecomputeReport(
                    *(getattr(total, each.name) + getattr(made, each.name) for each in fields(made))
                )
            return progress.end(total)

    def _job(self, body: Mapping[str, Any], progress: IngestionProgress) -> PrecomputeReport:
        """Begin a precomputation and ask until it is done.

        Its replica alone knows it: where that is gone, another one computes what is missing.
        """
        headers = self._route(body["texts"])
        job = self._connection.call("post", _CHUNKS, body, headers=headers)
        seen, pause = 0, _FIRST_PAUSE_S
        while True:
            done = len(body["texts"]) if job["status"] == "done" else int(job.get("done") or 0)
            for text in body["texts"][seen:done]:
                progress.stored(len(text))
            progress.say_left()
            seen = done
            if job["status"] == "failed":
                raise self._connection.error_of({"message": job.get("error")})
            if job["status"] == "done":
                return PrecomputeReport.from_dict(job.get("report") or {})
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                job = self._connection.call("get", f"{_CHUNKS}/{job['id']}", headers=headers)
            except ServerError as error:
                if error.status != HTTPStatus.NOT_FOUND or body["wait"]:
                    raise
                body = {**body, "wait": True}
                job = self._connection.call("post", _CHUNKS, body, headers=headers)

    def contains(self, text: str, **overrides: Any) -> bool:
        """Whether the server can reuse the chunk, behind this sink."""
        reuse = reuse_fields(self.reuse, overrides)
        asked = {"text": text}
        asked |= {name: str(reuse[name]) for name in ("sink", "method") if name in reuse}
        return bool(self._connection.call("get", _CHUNKS, params=asked)["text_known"])

    def forget(self, text: str | None = None, *, document: str | None = None) -> int:
        """Delete a chunk, or a document's own; return how many."""
        given = {"text": text, "document": document}
        body = {name: each for name, each in given.items() if each is not None}
        if len(body) != 1:
            raise ConfigError("forget takes a chunk's text or document=..., one of them")
        return int(self._connection.call("delete", _CHUNKS, body)["deleted"])

    def prefetch(
        self, texts: Sequence[str], *, for_next_answer: bool = True, **overrides: Any
    ) -> None:
        """Name the chunks that were retrieved: the server starts loading them.

        The next answer's report accounts for each; not so without ``for_next_answer``.
        """
        body: dict[str, Any] = {"texts": _checked(texts)}
        if reuse := reuse_fields(self.reuse, overrides):
            body["ragkv"] = reuse
        headers = self._route(body["texts"])
        self._connection.call("post", f"{_CHUNKS}/prefetch", body, headers=headers)
        if for_next_answer:
            self._named.add(text.strip() for text in texts)

    def wait(self) -> None:
        """Return at once: :meth:`precompute` has waited, and the rest is the server's work."""

    def warm_up(self) -> None:
        """Return at once: the server has warmed up before it was ready."""

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
        """Answer a prompt piece by piece: a text, or chat messages.

        ``settings`` are fields of :class:`ragkv.DecodeConfig`, without
        ``drafts``, and of ``generation`` those that a server takes
        (``repetition_penalty``, ``min_p``; ``logprobs`` for chat messages alone), and of
        :class:`ragkv.ReuseConfig`. ``timeout`` takes the client's place. The report accounts for
        each of the ``retrieved`` chunks, and those that :meth:`prefetch` named.

        Raises
        ------
        ConfigError
            A setting is wrong. What the server says comes from the stream.
        """
        decode = {name: settings.pop(name) for name in DECODE_SETTINGS if name in settings}
        body = body_of(
            asked := prompt_of(prompt, chat_template_kwargs),
            DecodeConfig(**decode),
            reuse_fields(self.reuse, settings),
            self._model or "default",
        )
        named = self._named.claim(self._named.take(), partial(contains, asked))
        if texts := list(dict.fromkeys((*retrieved, *named))):
            body["ragkv"]["retrieved"] = texts
        path = "/v1/chat/completions" if isinstance(asked, Chat) else "/v1/completions"

        async def answer(on_text: Callable[[str], None]) -> Completion:
            collected, headers = Events(), await self._route_in_loop(texts)
            async with aclosing(self._connection.events(path, body, headers)) as events:
                async for event in events:
                    on_text(collected.feed(event))
            return collected.completion()

        stream = RemoteStream(lambda on_text: self._connection.submit(answer(on_text)))
        return stream.within(self._connection.timeout if timeout is None else timeout)

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
        return str(self._connection.call("post", "/v1/sink", body)["sink"])

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens by the model's own tokenizer, without special tokens."""
        body = {"prompt": text, "add_special_tokens": False}
        return list(map(int, self._connection.call("post", "/tokenize", body)["tokens"]))

    @property
    def version(self) -> Mapping[str, Any]:
        """What the server says of itself, asked once.

        Raises
        ------
        ServerError
            It cannot be reached, refuses the key, or is no server of ragkv.
        """
        with self._asking:
            return self._version or self._noted(self._connection.call("get", "/version"))

    def _noted(self, version: Mapping[str, Any]) -> Mapping[str, Any]:
        missing = {"model", "namespace", "fingerprint", "positions"} - version.keys()
        if missing:
            raise ServerError(
                f"{self.base_url}/version has no {', '.join(sorted(missing))}: is it "
                "`ragkv serve`, of this version?"
            )
        self._version = version
        return version

    def _route(self, texts: Sequence[str]) -> dict[str, str]:
        """Return the header by which a proxy finds the replica where these chunks are warm."""
        return {HEADER: route_of(texts, self.namespace)} if texts else {}

    async def _route_in_loop(self, texts: Sequence[str]) -> dict[str, str]:
        """Return the same without a lock; none where the server does not name its namespace."""
        if not texts:
            return {}
        with suppress(ServerError, ConfigError, TimeoutError):
            found = self._version or self._noted(await self._connection.request("get", "/version"))
            return {HEADER: route_of(texts, str(found["namespace"]))}
        return {}

    @property
    def namespace(self) -> str:
        """The namespace that the key opens."""
        return str(self.version["namespace"])

    @property
    def info(self) -> ModelInfo:
        """The server's model."""
        found = self.version
        why = "" if found.get("supported", True) else "the server serves it by full prefill"
        return ModelInfo(str(found["model"]), found["fingerprint"], found["positions"], why)

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


def _checked(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ConfigError(f"give the chunk texts in a list, not {type(texts).__name__}")
    return list(texts)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield texts in lists whose bodies a server takes."""
    batch: list[str] = []
    length = 0
    for text in texts:
        if batch and (len(batch) == _BATCH_CHUNKS or length + len(text) > _BATCH_CHARS):
            yield batch
            batch, length = [], 0
        batch.append(text)
        length += len(text)
    if batch:
        yield batch
