"""Carry scores from one tokenizer's tokens to another's, over character offsets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def map_scores(
    scores: npt.NDArray[np.float32],
    source: npt.NDArray[np.int32],
    target: npt.NDArray[np.int32],
) -> npt.NDArray[np.float32]:
    """Return a score for each target token: the mean over the characters it covers.

    Parameters
    ----------
    scores
        ``[source tokens]``.
    source, target
        ``[tokens, 2]`` first character and end, in one text. Characters that several
        source tokens cover (the bytes of an emoji) get the sum of their scores;
        characters that none covers get 0.

    Returns
    -------
    numpy.ndarray
        ``[target tokens]`` float32.
    """
    length = int(max(source[:, 1].max(initial=0), target[:, 1].max(initial=0)))
    change = np.zeros(length + 1, dtype=np.float64)
    width = np.maximum(source[:, 1] - source[:, 0], 0)
    covering = width > 0
    np.add.at(change, source[covering, 0], scores[covering])
    np.add.at(change, source[covering, 1], -scores[covering])
    sums = np.concatenate([[0.0], np.cumsum(np.cumsum(change))])
    spans = np.maximum(target[:, 1] - target[:, 0], 1)
    means: npt.NDArray[np.float32] = (
        (sums[target[:, 0] + spans] - sums[target[:, 0]]) / spans
    ).astype(np.float32)
    return means
