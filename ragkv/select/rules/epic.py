"""The first tokens of every chunk after the first (EPIC's LegoLink, arXiv 2410.15332).

The paper takes k = 16 a chunk; here k follows from ``recompute_ratio``.
"""

import numpy as np

from ragkv.select.method import FloatArray, Method, Scene

_FIRST_CHUNK_LAST = 1e6


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]``: minus a token's place in its chunk; the first chunk comes last."""
    parts = [
        -np.arange(len(piece.slots), dtype=np.float32) - (_FIRST_CHUNK_LAST if index == 0 else 0.0)
        for index, piece in enumerate(scene.layout.placed)
    ]
    return np.concatenate(parts).astype(np.float32)


METHOD = Method("epic", score=score)
