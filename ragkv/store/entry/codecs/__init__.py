"""How an entry's numbers become bytes: one file a codec, all behind one contract."""

from __future__ import annotations

from ragkv.config import CODECS
from ragkv.errors import StoreError
from ragkv.store.entry.codecs.base import Codec
from ragkv.store.entry.codecs.int4 import Int4
from ragkv.store.entry.codecs.int8 import Int8
from ragkv.store.entry.codecs.raw import Raw

__all__ = ["CODECS", "Codec", "codec_of"]

_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw(), Int8(), Int4())}


def codec_of(name: str) -> Codec:
    """Return the codec of this name.

    Raises
    ------
    StoreError
        There is none.
    """
    if name not in CODECS:
        raise StoreError(f"unknown codec {name!r}; known: {', '.join(CODECS)}")
    return _CODECS[name]
