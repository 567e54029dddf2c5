"""Where the last tokens of a prompt and its answer occurred before."""

import numpy as np
import pytest

from ragkv.prompt.history import LONGEST_MATCH, TokenHistory


def plain(ids: list[int]) -> list[tuple[int, int]]:
    """Return every earlier position of the last token with the length of its match."""
    found = []
    for at in range(len(ids) - 1):
        same = 0
        while same < min(LONGEST_MATCH, at + 1) and ids[at - same] == ids[-1 - same]:
            same += 1
        if same:
            found.append((at, same))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_occurrences_are_those_of_a_plain_search(seed):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, int(rng.integers(2, 6)), int(rng.integers(1, 60))).astype(np.int32)
    history, ids = TokenHistory(prompt), prompt.tolist()
    for _ in range(700):  # more than the first allocation has room for
        new = rng.integers(0, 5, int(rng.integers(1, 4))).tolist()
        history.append(new)
        ids += new
        if rng.random() < 0.2:
            length = max(len(prompt), len(ids) - int(rng.integers(0, 5)))
            history.truncate(length)
            del ids[length:]
        if rng.random() < 0.05:
            at, lengths = history.occurrences()
            assert list(zip(at.tolist(), lengths.tolist(), strict=True)) == plain(ids)
    assert history.ids.tolist() == ids


def test_the_prompt_is_never_forgotten():
    history = TokenHistory(np.array([3], dtype=np.int32))
    assert [part.tolist() for part in history.occurrences()] == [[], []]
    history.append([7])
    history.truncate(0)
    assert history.ids.tolist() == [3]
