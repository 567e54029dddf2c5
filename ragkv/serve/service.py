"""One server's state: its engines, its limits, its metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

from fastapi import Depends, Request

from ragkv.engine.engine import RagKV
from ragkv.errors import ConfigError, ServerError
from ragkv.prompt.chat import Chat, TokenIds
from ragkv.select import method_of
from ragkv.serve.body import Body, read_body
from ragkv.serve.config import ServeConfig
from ragkv.serve.fields import ReuseFields
from ragkv.serve.gate import Gate
from ragkv.serve.ingestion import Ingestion
from ragkv.serve.keys import namespace_of
from ragkv.serve.metrics import ServerMetrics
from ragkv.serve.refusal import RefusedError

_log = logging.getLogger(__name__)
ANSWERS = 16
"""Most answers to one request: ``n`` times its prompts."""
TEXTS = 4096
"""Most chunks in one request."""
TEXT_CHARACTERS = 100_000
"""Most characters of a chunk or a sink."""

_THREADS = 16
_PAUSE_S = 2.0
_ANY_MODEL = ("default", "tgi", "dummy")
"""Names for the model; Hugging Face's clients send the last two."""
Given = ParamSpec("Given")
Done = TypeVar("Done")


class Service:
    """The common state of one server's requests.

    Parameters
    ----------
    engines
        One for each namespace, all over one model. The caller closes them.

    Raises
    ------
    ConfigError
        A served namespace has no engine.
    """

    def __init__(self, settings: ServeConfig, engines: Mapping[str, RagKV]) -> None:
        missing = settings.namespaces - engines.keys()
        if missing:
            raise ConfigError(f"no engine for the namespace {', '.join(sorted(missing))}")
        self.settings = settings
        self.engines = dict(engines)
        first = next(iter(self.engines.values()))
        self.model_name = settings.model_name or _public_name(first.info.name)
        self.fingerprint = first.info.fingerprint
        self._most_tokens = first.loaded.positions
        self._longest_token = max(map(len, first.tokenizer.get_vocab()))
        self.metrics = ServerMetrics(
            lambda: first.status().running,
            lambda: first.status().waiting,
            lambda: [engine.status() for engine in self.engines.values()],
        )
        self.gate = Gate(first.status().max_running + settings.max_waiting)
        self.ingestion = Ingestion(settings.timeout)
        self.ready = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ragkv-serve")

    async def in_thread(
        self, work: Callable[Given, Done], *args: Given.args, **kwargs: Given.kwargs
    ) -> Done:
        """Run a call that can wait for the model or the store outside of the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    async def warm_up(self) -> None:
        """Warm up the engines, with vLLM if it decodes, then report the server as ready."""
        while not self.ready:
            try:
                for engine in self.engines.values():
                    await self.in_thread(engine.warm_up)
                self.ready = True
            except ServerError as error:
                _log.warning("not ready: %s", error)
                await asyncio.sleep(_PAUSE_S)
            except Exception:
                _log.exception("an engine could not be warmed up")
                raise

    async def close(self) -> None:
        """Stop precomputations and the threads."""
        await asyncio.to_thread(self.ingestion.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, kind: type[Body], request: Request) -> Body:
        """Return a request's body; RefusedError as from :func:`read_body`."""
        return await read_body(kind, request, self.settings.timeout)

    def engine_for(self, authorization: str) -> RagKV:
        """Return the engine for an ``Authorization`` header.

        Raises
        ------
        RefusedError
            401: the key is missing or wrong.
        """
        settings = self.settings
        namespace: str | None = settings.namespace
        if settings.keys:
            namespace = namespace_of(authorization, settings.keys)
        if namespace is None:
            raise RefusedError(
                401,
                "The API key is missing or wrong: Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return self.engines[namespace]

    def require_model(self, name: str) -> None:
        """Refuse the name of a different model, with 404."""
        if name not in {self.model_name, *_ANY_MODEL}:
            message = f"Unknown model {name!r}: this server has {self.model_name!r}."
            raise RefusedError(404, message, param="model", code="model_not_found")

    def check_prompt(self, prompt: str | Chat | TokenIds) -> None:
        """Refuse a prompt that is certainly too long, before it is tokenised."""
        if self._most_tokens is None:
            return
        size, most = len(prompt), self._most_tokens
        if isinstance(prompt, str | Chat):
            texts = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt]
            size, most = sum(map(len, texts)), most * self._longest_token
        if size > most:
            raise RefusedError(
                400,
                "The prompt exceeds the model's positions: retrieve fewer chunks.",
                code="context_length_exceeded",
            )


def check_answers(count: int) -> None:
    """Refuse too many answers to one request, with 400."""
    if count > ANSWERS:
        raise _too_large(f"At most {ANSWERS} answers at once.", "n")


def check_texts(texts: Sequence[str], param: str) -> None:
    """Refuse too many or too long texts, with 400."""
    if len(texts) > TEXTS:
        raise _too_large(f"At most {TEXTS} texts at once.", param)
    if any(len(text) > TEXT_CHARACTERS for text in texts):
        raise _too_large(f"A text has at most {TEXT_CHARACTERS} characters.", param)


def _too_large(message: str, param: str) -> RefusedError:
    return RefusedError(400, message, param=param, code="too_large")


def overrides_of(engine: RagKV, fields: ReuseFields) -> dict[str, Any]:
    """Return a request's settings of reuse; RefusedError, 400, if one is wrong."""
    check_texts([fields.sink or ""], "ragkv.sink")
    given = fields.settings()
    for name, value in given.items():
        try:
            method_of(engine.reuse.override(**{name: value}))
        except ConfigError as error:
            param = f"ragkv.{name}"
            raise RefusedError(400, str(error), param=param, code="invalid_value") from None
    return given


def _public_name(name: str) -> str:
    """Return a model's name, without the path to its folder."""
    return Path(name).resolve().name if Path(name).is_dir() else name


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


State = Annotated[Service, Depends(_service)]
"""The server's state."""


async def _engine(request: Request, service: State) -> RagKV:
    service.gate.refuse_draining()
    return service.engine_for(request.headers.get("authorization", ""))


Engine = Annotated[RagKV, Depends(_engine)]
"""The engine of the request's key."""
