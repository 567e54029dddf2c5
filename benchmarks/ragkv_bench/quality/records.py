"""Finished measurements on disk, one JSON line each, so that a run can be taken up again."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ragkv.errors import ConfigError

_log = logging.getLogger(__name__)
_END = {"complete": True}

Ratio = float | Literal["auto"]


def ratio_name(ratio: Ratio) -> str:
    """Return how a ratio is shown: ``0.2``, ``auto``."""
    return ratio if isinstance(ratio, str) else f"{ratio:g}"


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One example under one method and ratio.

    ``key`` names everything that the measurement depends on; ``ttft_full_s`` is the full
    prefill measured right before it, in seconds.
    """

    key: str
    id: str
    method: str
    ratio: Ratio
    answer: str
    score: float
    exact_match: float | None
    kl: float
    agreement: float
    share_recomputed: float
    prompt_tokens: int
    ttft_s: float
    ttft_full_s: float


class RecordFile:
    """Append-only JSONL of records.

    Opening keeps an interrupted run's records and overwrites a complete run's. A last line that
    an interruption tore is dropped.

    Parameters
    ----------
    path
        The file, or None to keep nothing on disk.
    resume
        True also keeps a complete run's records, False starts over in any case.

    Raises
    ------
    ConfigError
        The file cannot be written, or is not a file of records.
    """

    def __init__(self, path: str | Path | None, *, resume: bool | None = None) -> None:
        self._path = path = None if path is None else Path(path)
        self._known: dict[str, EvalRecord] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and resume is not False:
                records, complete = _read(path)
                if resume or not complete:
                    self._known = {record.key: record for record in records}
            temporary = path.with_name(f"{path.name}.tmp")
            temporary.write_text("".join(map(_line, self._known.values())), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
        if self._known:
            _log.info("%d finished measurements are taken from %s", len(self._known), path)

    def get(self, key: str) -> EvalRecord | None:
        """Return the record of this key, if it is there."""
        return self._known.get(key)

    def add(self, record: EvalRecord) -> None:
        """Keep a record; it is on disk when this returns."""
        self._known[record.key] = record
        self._append(_line(record))

    def finish(self) -> None:
        """Mark the run complete: the next one over this file starts over."""
        self._append(json.dumps(_END) + "\n")

    def _append(self, line: str) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(line)
                out.flush()
                os.fsync(out.fileno())


def records_path(path: Path) -> Path:
    """Return the path of a result's measurements: next to it."""
    return path.with_name(path.name.removesuffix(".json") + ".rows.jsonl")


def _line(record: EvalRecord) -> str:
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"


def _read(path: Path) -> tuple[list[EvalRecord], bool]:
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    records: list[EvalRecord] = []
    complete = False
    for number, line in enumerate(lines, start=1):
        try:
            row: dict[str, Any] = json.loads(line)
            complete = row == _END
            if not complete:
                records.append(EvalRecord(**row))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}:{number} is not a record of `ragkv eval`: remove the file or choose"
                " another name"
            ) from error
    return records, complete
