"""Answers as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ragkv.serve.answers import AnswerPart, Answers
from ragkv.serve.body import dump
from ragkv.serve.metrics import ServerMetrics
from ragkv.serve.refusal import refusal_of
from ragkv.serve.writer import AnswerWriter

_DONE = "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Sends an answer's chunks as they come; ends the answers with the connection.

    Parameters
    ----------
    first
        The part that was waited for, before the answer's status was known.
    """

    def __init__(
        self,
        answers: Answers,
        first: AnswerPart,
        writer: AnswerWriter,
        metrics: ServerMetrics,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            self._events(first),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
        )
        self._answers = answers
        self._writer = writer
        self._metrics = metrics
        self._failed = False

    async def _events(self, first: AnswerPart) -> AsyncIterator[str]:
        try:
            yield _event(self._writer.chunk(first))
            async for part in self._answers:
                yield _event(self._writer.chunk(part))
            if self._writer.with_usage:
                yield _event(self._writer.last())
        except Exception as error:  # noqa: BLE001  the status has been sent
            self._failed = True
            refusal = refusal_of(error)
            self._metrics.record_error(refusal.code)
            yield _event(refusal.body())
        yield _DONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the end, or until the client leaves."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close()
            if self._writer.unfinished and not self._failed:
                self._metrics.record_abort(self._writer.unfinished)


def _event(content: object) -> str:
    return f"data: {dump(content)}\n\n"
