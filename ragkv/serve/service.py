"""One server's state: its engines, who comes in, what is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, ParamSpec, TypeVar

from fastapi import Depends, Request

from ragkv.engine.engine import RagKV
from ragkv.errors import ConfigError, ServerError
from ragkv.prompt.chat import Chat, TokenIds
from ragkv.serve import limits
from ragkv.serve.config import ServeConfig
from ragkv.serve.engine_calls import most_characters, public_name, warm_up
from ragkv.serve.gate import Gate
from ragkv.serve.ingestion import IngestionQueue
from ragkv.serve.keys import namespace_of
from ragkv.serve.metrics import ServerMetrics
from ragkv.serve.refusal import RefusedError

_log = logging.getLogger(__name__)
_THREADS = 16
_PAUSE_S = 2.0
_ANY_MODEL = ("default", "tgi", "dummy")
"""Names for the one model; the latter two come from Hugging Face's clients."""
Given = ParamSpec("Given")
Done = TypeVar("Done")


class Service:
    """What all requests of one server share.

    Parameters
    ----------
    engines
        By namespace, all over one model; they stay the caller's.

    Raises
    ------
    ConfigError
        A namespace that is served has no engine.
    """

    def __init__(self, settings: ServeConfig, engines: Mapping[str, RagKV]) -> None:
        missing = settings.namespaces - engines.keys()
        if missing:
            raise ConfigError(f"no engine for the namespace {', '.join(sorted(missing))}")
        self.settings = settings
        self.engines = dict(engines)
        first = next(iter(self.engines.values()))
        self.model_name = settings.model_name or public_name(first)
        self.fingerprint = first.info.fingerprint
        self._most_tokens = first.loaded.positions
        self._most_characters = most_characters(first)
        self.metrics = ServerMetrics(
            lambda: first.status().running,
            lambda: first.status().waiting,
            lambda: [engine.status() for engine in self.engines.values()],
        )
        self.gate = Gate(settings.max_running + settings.max_waiting)
        self.ingestion = IngestionQueue(limits.JOBS)
        self.ready = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ragkv-serve")

    async def in_thread(
        self, work: Callable[Given, Done], *args: Given.args, **kwargs: Given.kwargs
    ) -> Done:
        """Run what may wait for the model or the store; the event loop goes on."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    async def warm_up(self) -> None:
        """Warm up the engine of every namespace; the server is ready then.

        It waits for a vLLM that is to decode.
        """
        while not self.ready:
            try:
                for engine in self.engines.values():
                    await self.in_thread(warm_up, engine)
                self.ready = True
            except ServerError as error:
                _log.warning("not ready: %s", error)
                await asyncio.sleep(_PAUSE_S)
            except Exception:
                _log.exception("an engine could not be warmed up")
                raise

    async def close(self) -> None:
        """End precomputations, and the threads."""
        await asyncio.to_thread(self.ingestion.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def engine_for(self, authorization: str) -> RagKV:
        """Return the engine of the namespace that an ``Authorization`` header opens.

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
                *(401, "The API key is missing or wrong: Authorization: Bearer KEY."),
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return self.engines[namespace]

    def require_model(self, name: str) -> None:
        """Refuse other models' names, with 404."""
        if name not in {self.model_name, *_ANY_MODEL}:
            raise RefusedError(
                *(404, f"There is no model {name!r}: the one here is {self.model_name!r}."),
                param="model",
                code="model_not_found",
            )

    def check_answers(self, count: int) -> None:
        """Refuse more answers than one request may ask for."""
        if count > limits.ANSWERS:
            raise _too_large(f"At most {limits.ANSWERS} answers at once.", "n")

    def check_prompt(self, prompt: str | Chat | TokenIds) -> None:
        """Refuse a prompt that is too long: token ids, or by far, before it is tokenised."""
        size, most = len(prompt), self._most_tokens
        if isinstance(prompt, str | Chat):
            texts = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt]
            size, most = sum(map(len, texts)), self._most_characters
        if most is not None and size > most:
            raise RefusedError(
                *(400, "The prompt exceeds the model's positions: retrieve fewer chunks."),
                code="context_length_exceeded",
            )

    def check_chunks(self, texts: list[str], param: str) -> None:
        """Refuse too many or too long texts."""
        if len(texts) > limits.TEXTS:
            raise _too_large(f"At most {limits.TEXTS} texts at once.", param)
        if any(len(text) > limits.TEXT_CHARACTERS for text in texts):
            raise _too_large(f"A text has at most {limits.TEXT_CHARACTERS} characters.", param)


def _too_large(message: str, param: str) -> RefusedError:
    return RefusedError(400, message, param=param, code="too_large")


def service_of(request: Request) -> Service:
    """Return the server's state."""
    service: Service = request.app.state.service
    return service


async def _engine(request: Request) -> RagKV:
    service = service_of(request)
    service.gate.refuse_draining()
    return service.engine_for(request.headers.get("authorization", ""))


Engine = Annotated[RagKV, Depends(_engine)]
"""The engine of the request's key."""
