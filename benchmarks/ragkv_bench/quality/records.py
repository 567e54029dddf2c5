"""Finished measurements on disk, one JSON line each, so that a run can be taken up again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ragkv.errors import ConfigError

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
    kl: float
    agreement: float
    share_recomputed: float
    prompt_tokens: int
    ttft_s: float
    ttft_full_s: float


class RecordFile:
    """Append-only JSONL of records, whose measurements are not repeated.

    A last line that an interruption tore is dropped.

    Parameters
    ----------
    path
        The file, or None to keep nothing on disk.

    Raises ConfigError: the file cannot be written, or is not a file of records.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = path = None if path is None else Path(path)
        self._known: dict[str, EvalRecord] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._known = {record.key: record for record in _read(path)}
            temporary = path.with_name(f"{path.name}.tmp")
            temporary.write_text("".join(map(_line, self._known.values())), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error

    def get(self, key: str) -> EvalRecord | None:
        """Return the record of this key, if it is there."""
        return self._known.get(key)

    def add(self, record: EvalRecord) -> None:
        """Keep a record; it is on disk when this returns."""
        self._known[record.key] = record
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(_line(record))
                out.flush()
                os.fsync(out.fileno())


def records_path(path: Path) -> Path:
    """Return the path of a result's measurements: next to it."""
    return path.with_name(path.name.removesuffix(".json") + ".rows.jsonl")


def _line(record: EvalRecord) -> str:
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"


def _read(path: Path) -> list[EvalRecord]:
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    try:
        return [EvalRecord(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} has a line that is no record of `ragkv eval`: remove the file or choose"
            " another name"
        ) from error
