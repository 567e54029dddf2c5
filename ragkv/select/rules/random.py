"""Tokens drawn uniformly: what any informed choice has to beat."""

import numpy as np

from ragkv.select.method import FloatArray, Method, Scene


def score(scene: Scene) -> FloatArray:
    """Return ``[cached]`` seeded uniform scores."""
    generator = np.random.default_rng(scene.seed)
    return generator.random(len(scene.layout.cached), dtype=np.float32)


METHOD = Method("random", source="baseline", score=score)
