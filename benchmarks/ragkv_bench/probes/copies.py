"""Copies: one record, to be given back verbatim, among records of the same shape."""

from __future__ import annotations

import random
from functools import partial

from ragkv.engine.quality import question, shapes, statement
from ragkv_bench.data.needle_words import ADJECTIVES, NOUNS
from ragkv_bench.data.needles import Hidden, Hide, draw_keys

RECORDS = 3
"""Records in a prompt, with the requested one among them."""


def _code(draw: random.Random) -> str:
    verb, noun, host = (draw.choice(each) for each in (("load", "open", "send"), NOUNS, NOUNS))
    port, seconds, retries = (draw.randint(2, most) for most in (9999, 99, 9))
    return f"curl https://{host}.example.org:{port}/{verb}/{noun}?t={seconds} --retry {retries}"


_SHAPES = shapes(ADJECTIVES, NOUNS) | {"code": ("download command", _code)}


def _hide(shape: str, draw: random.Random) -> Hidden:
    what, value = _SHAPES[shape]
    records = {key: value(draw) for key in draw_keys(draw, RECORDS)}
    requested = next(iter(records))
    needles = [(statement(what, key, record), key == requested) for key, record in records.items()]
    draw.shuffle(needles)
    return Hidden("copy", tuple(needles), question(what, requested), (records[requested],))


KINDS: dict[str, Hide] = {shape: partial(_hide, shape) for shape in _SHAPES}
