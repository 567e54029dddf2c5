"""Blobs are read to the last byte and written back the same; anything else is refused by name."""

from itertools import product

import numpy as np
import pytest
from llama_stand_in import Dialect
from llamacpp_ragkv.blob import parse, render

from ragkv.errors import UnsupportedModelError

DRAWN = np.random.default_rng(0)
KEYS, VALUES = (DRAWN.standard_normal((3, 7, 8)).astype(np.float32) for _ in range(2))
DIALECTS = [
    Dialect(version, transposed, dtype, streams, stream)
    for version, transposed, dtype in product((3, 4), (False, True), ("f2", "f4"))
    for streams, stream in ((1, 0), (4, 0), (4, 2), (4, 3))
]


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_a_blob_comes_back_byte_for_byte(dialect):
    blob = dialect.write(5, KEYS, VALUES)
    form, rows = parse(blob)
    assert render(form, rows) == blob
    assert rows.positions.tolist() == list(range(5, 12))
    np.testing.assert_array_equal(rows.keys, KEYS.astype(dialect.dtype))
    np.testing.assert_array_equal(rows.values, VALUES.astype(dialect.dtype))
    assert (form.transposed, form.streams, form.stream) == (
        dialect.transposed,
        dialect.streams,
        dialect.stream,
    )


GOOD = Dialect().write(0, KEYS, VALUES)
TWO_STREAMS = Dialect(streams=2).write(0, KEYS, VALUES)
REFUSED = {
    "K or V have the type 8": Dialect(kind=8).write(0, KEYS, VALUES),
    "K or V are rotated": Dialect(rotation=(8, 0)).write(0, KEYS, VALUES),
    "it begins with 0x": bytes(4) + GOOD[4:],
    "4 bytes are left": GOOD + bytes(4),
    "unknown format": GOOD[:-4],
    "not those of one sequence": GOOD[:20] + b"\2" + GOOD[21:],
    "several streams": TWO_STREAMS[:-4] + b"\7" + bytes(3),
    "cells": Dialect(streams=2).write(0, KEYS[:, :0], VALUES[:, :0]),
    "a value of V has": Dialect(transposed=True).write(0, KEYS, VALUES)[: 12 + 4 + 84 + 16]
    + Dialect(dtype="f2", transposed=True, kind=0).write(0, KEYS, VALUES)[12 + 4 + 84 + 16 :],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_another_format_is_refused_by_name(reason):
    with pytest.raises(UnsupportedModelError, match=r"unknown format of llama.cpp's state.*") as e:
        parse(REFUSED[reason])
    assert reason in str(e.value)
