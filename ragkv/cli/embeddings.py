"""Embeddings of chunks, kept between commands."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ragkv.model.folders import cache_folder

Vectors = npt.NDArray[np.float32]
_log = logging.getLogger(__name__)
_WAIT_S = 5.0
_AT_ONCE = 500
"""Keys of one query; SQLite allows 999."""


def kept_embeddings() -> Path:
    """Return the user's file of embeddings; it may be deleted at any time."""
    return cache_folder() / "embeddings.sqlite"


class Embeddings:
    """Rows by text and model, in a SQLite file: bytes alone, nothing is unpickled.

    A file that cannot be read or written is as good as none: the texts are embedded again.

    Parameters
    ----------
    model
        Name and version of the model: rows of another one are never returned.
    """

    def __init__(self, path: Path, model: str) -> None:
        self._path = path
        self._model = model

    def load(self, texts: Sequence[str], width: int) -> dict[str, Vectors]:
        """Return the rows ``[width]`` that are kept, by text."""
        by_key = {self._key(text): text for text in texts}
        keys, found = list(by_key), dict[str, Vectors]()
        if not self._path.is_file():
            return found
        try:
            with closing(self._open()) as file:
                for at in range(0, len(keys), _AT_ONCE):
                    part = keys[at : at + _AT_ONCE]
                    marks = ",".join("?" * len(part))
                    query = f"SELECT key, row FROM rows WHERE key IN ({marks})"  # noqa: S608
                    for key, row in file.execute(query, part):
                        if isinstance(row, bytes) and len(row) == 4 * width:
                            found[by_key[key]] = np.frombuffer(row, dtype="<f4")
        except (sqlite3.Error, OSError) as error:
            _log.warning("%s cannot be read: %s", self._path, error)
        return found

    def store(self, rows: Mapping[str, Vectors]) -> None:
        """Keep rows."""
        given = [(self._key(text), row.astype("<f4").tobytes()) for text, row in rows.items()]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as file, file:
                file.execute("CREATE TABLE IF NOT EXISTS rows (key BLOB PRIMARY KEY, row BLOB)")
                file.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", given)
        except (sqlite3.Error, OSError) as error:
            _log.warning("%s cannot be written: %s", self._path, error)

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=_WAIT_S)

    def _key(self, text: str) -> bytes:
        return blake3(f"{self._model}\0{text}".encode()).digest()
