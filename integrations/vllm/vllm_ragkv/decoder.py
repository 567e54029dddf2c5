"""Answers that vLLM decodes, behind rows that ragkv repaired."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import aclosing, closing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ragkv.answer.completion import FinishReason, TokenLogprobs
from ragkv.config import DecodeConfig
from ragkv.decode.generate import Drawn, StopTexts, stops_of, within_max_length
from ragkv.decode.listener import Listener
from ragkv.errors import ServerError
from ragkv.history.node import Rows
from ragkv.model.loaded import LoadedModel, require_reusable
from ragkv.prompt.tokens import IntArray
from vllm_ragkv.files import default_folder
from vllm_ragkv.handover import HandOverFolder
from vllm_ragkv.sampling import fields_of
from vllm_ragkv.server import COMPLETIONS, ID, VllmServer

_log = logging.getLogger(__name__)
_POLL_S = 0.05


class VllmDecoder:
    """A vLLM that decodes answers: ``RagKV(model, decoder=VllmDecoder(url))``.

    It can serve several engines over one model. Close it after them.

    Parameters
    ----------
    url
        A vLLM with ragkv's connector. The environment variable ``VLLM_API_KEY`` has its key.
    folder
        The connector's folder of hand-overs; None is the user's, in shared memory.
    most_bytes
        Limit for pending hand-overs; None is half of the free space.

    Raises
    ------
    ConfigError
        ``url`` is no address, or other users can enter the folder.
    """

    def __init__(
        self, url: str, folder: Path | None = None, *, most_bytes: int | None = None
    ) -> None:
        handovers = HandOverFolder(folder or default_folder(), most_bytes=most_bytes)
        self.server = VllmServer(url, handovers, os.environ.get("VLLM_API_KEY"))

    def __call__(self, loaded: LoadedModel, namespace: str, decode: DecodeConfig) -> VllmAnswer:
        """Begin an answer; ConfigError for settings that vLLM lacks."""
        return VllmAnswer(self.server, namespace, loaded, decode)

    def close(self) -> None:
        """End its answers; later requests raise ClosedError."""
        self.server.close()


class VllmAnswer:
    """One answer that vLLM decodes: a :class:`~ragkv.engine.plan.RemoteAnswer`."""

    def __init__(
        self, server: VllmServer, namespace: str, loaded: LoadedModel, decode: DecodeConfig
    ) -> None:
        self.handed_over, self.not_loaded = 0, ""
        self._server, self._decode = server, decode
        self._loaded = require_reusable(loaded)
        self._fields = fields_of(loaded, decode)
        self._stops = StopTexts(loaded.tokenizer, stops_of(loaded, decode))
        self._salt, self._opens = server.folder.salt(namespace), ""

    def hand_over(self, ids: IntArray, compute: Callable[[], Rows]) -> bool:
        """Write rows for vLLM; without room for them it computes the prompt itself."""
        server = self._server
        server.connect(self._loaded)
        size = self._loaded.architecture.values_per_token * getattr(torch, server.dtype).itemsize
        self.not_loaded = "full"
        if not server.folder.has_room(len(ids) * size):
            return False
        keys, values = compute()
        try:
            self._opens = server.folder.write(ids, keys, values, server.dtype, server.instance)
            self.handed_over = len(ids)
        except OSError as error:
            _log.warning("nothing is handed over to vLLM: %s", error)
        return True

    def draw(self, ids: IntArray, listener: Listener, cancelled: Callable[[], bool]) -> Drawn:
        """Have vLLM continue the prompt; pass its tokens on as they come."""
        server, tokens = self._server, list[int]()
        reason: FinishReason | None = None
        listener.put(torch.from_numpy(ids))
        try:
            with closing(_events(server, self._body(ids), cancelled)) as events:
                for event in events:
                    for choice in event.get("choices") or ():
                        reason = reason or self._take(choice, tokens, listener)
                    if reason is not None:
                        break
        except ServerError:
            server.instance = ""  # another vLLM can run there next
            raise
        finally:
            if self._opens:
                self.not_loaded = server.folder.take_outcome(self._opens)
        if self.not_loaded == "instance":
            server.instance = ""
        now = time.perf_counter()
        return Drawn(
            tokens,
            listener.first_at or now,
            listener.last_at or now,
            len(tokens) - 1,
            finish_reason=reason or "cancelled",
            logprobs=tuple(listener.progress.logprobs),
        )

    def _body(self, ids: IntArray) -> dict[str, Any]:
        self._server.connect(self._loaded)
        most = within_max_length(self._loaded, self._decode, len(ids)).max_new_tokens
        body = self._fields | {
            "prompt": ids.tolist(),
            "max_tokens": max(1, min(most, self._server.positions - len(ids))),
            "stream": True,
            "return_token_ids": True,
            "cache_salt": self._opens or self._salt,
        }
        if self._opens:
            body["kv_transfer_params"] = {"ragkv": {"id": self._opens}}
        return body

    def _take(
        self, choice: Mapping[str, Any], tokens: list[int], listener: Listener
    ) -> FinishReason | None:
        """Take the tokens of a part of the answer; return why it ends, if it does."""
        for token, record in _tokens_in(choice, self._decode.logprobs):
            tokens.append(token)
            if record is not None:
                listener.progress.logprobs.append(record)
            listener.put(torch.tensor([token]))
            if listener.ends() or self._stops.reached(torch.tensor(tokens)):
                return "stop"
        match choice.get("finish_reason"):
            case None | "stop" | "length" as reason:
                return reason
            case reason:
                raise ServerError(f"{self._server.url} ended an answer: {reason}")


def _events(
    server: VllmServer, body: Mapping[str, Any], cancelled: Callable[[], bool]
) -> Generator[dict[str, Any]]:
    """Yield the events of an answer until it is cancelled; closing this ends vLLM's work."""
    events: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    async def read() -> None:
        async with aclosing(server.connection.events(COMPLETIONS, body)) as found:
            async for event in found:
                events.put(event)

    reading = server.connection.submit(read())
    reading.add_done_callback(lambda _: events.put(None))
    try:
        while not cancelled():
            with suppress(Empty):
                event = events.get(timeout=_POLL_S)
                if event is None:
                    reading.result()
                    raise ServerError(f"{server.url} broke off in the middle of an answer")
                yield event
    except CancelledError:
        raise server.connection.closed() from None
    finally:
        reading.cancel()


def _tokens_in(
    choice: Mapping[str, Any], top: int | None
) -> Iterator[tuple[int, TokenLogprobs | None]]:
    """Yield the tokens of a part, each with its log-probabilities if ``top`` is a number."""
    ids = choice.get("token_ids") or []
    if top is None:
        yield from ((token, None) for token in ids)
        return
    found = choice["logprobs"]
    records = zip(ids, found["token_logprobs"], found["top_logprobs"], strict=True)
    for token, logprob, others in records:
        pairs = ((int(name.removeprefix(ID)), each) for name, each in (others or {}).items())
        best = sorted(pairs, key=lambda pair: -pair[1])[:top]
        yield token, TokenLogprobs(token, logprob, tuple(best))
