"""Chunks on a server: precompute, look up, delete, prefetch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tqdm.auto import tqdm

from ragkv.errors import ConfigError
from ragkv.report.account import PrecomputeReport
from ragkv.serve.remote.connection import Connection
from ragkv.serve.remote.errors import error_of

_PATH = "/v1/chunks"
_BATCH_CHUNKS, _BATCH_CHARS = 512, 1 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class Chunks:
    """The requests under ``/v1/chunks``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def precompute(
        self, texts: Iterable[str], given: Mapping[str, Any], *, show_progress: bool | None
    ) -> PrecomputeReport:
        """Have texts encoded, request by request; a document's are one request.

        Parameters
        ----------
        given
            The other fields of the request; those that are None or empty are left out.
        """
        _check_list(texts)
        fixed = {name: value for name, value in given.items() if value not in (None, {})}
        chunks = list(texts)
        batches = [chunks] if "document" in fixed else _batches(chunks)
        total = PrecomputeReport()
        hidden = None if show_progress is None else not show_progress  # None: unless a terminal
        with tqdm(total=len(chunks), disable=hidden, unit="chunk", desc="precompute") as bar:
            for batch in batches:
                job = self._job({"texts": batch, "wait": False, **fixed}, bar)
                total = _sum(
                    total, PrecomputeReport.from_dict(self._connection.submit(job).result())
                )
        return total

    async def _job(self, body: Mapping[str, Any], bar: Any) -> Mapping[str, Any]:
        """Begin a precomputation and ask until it is done; return its report."""
        job = await self._connection.request("POST", _PATH, json=body)
        seen, pause = 0, _FIRST_PAUSE_S
        while True:
            done = len(body["texts"]) if job["status"] == "done" else int(job.get("done") or 0)
            bar.update(done - seen)
            seen = done
            if job["status"] == "failed":
                raise error_of(job, None, self._connection.address)
            if job["status"] == "done":
                report: Mapping[str, Any] = job.get("report") or {}
                return report
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            job = await self._connection.request("GET", f"{_PATH}/{job['id']}")

    def contains(self, text: str, reuse: Mapping[str, Any]) -> bool:
        """Return whether a chunk can be reused."""
        behind = {name: reuse[name] for name in ("sink", "method") if name in reuse}
        found = self._connection.call("GET", _PATH, params={"text": text, **behind})
        return bool(found["text_known"])

    def delete(self, what: Mapping[str, str]) -> int:
        """Delete a text or a document; return how many chunks that were."""
        return int(self._connection.call("DELETE", _PATH, json=what)["deleted"])

    def prefetch(self, texts: Sequence[str], reuse: Mapping[str, Any]) -> None:
        """Have the server load chunks."""
        _check_list(texts)
        body = {"texts": list(texts), **({"ragkv": dict(reuse)} if reuse else {})}
        self._connection.call("POST", f"{_PATH}/prefetch", json=body)


def _check_list(texts: object) -> None:
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ConfigError(f"give the chunk texts in a list, not {type(texts).__name__}")


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


def _sum(one: PrecomputeReport, other: PrecomputeReport) -> PrecomputeReport:
    return PrecomputeReport(
        *(getattr(one, each.name) + getattr(other, each.name) for each in fields(one))
    )
