"""What an entry's header says of a contextual version."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from ragkv.store.entry.header import Header, RefusedEntryError, canonical
from ragkv.store.versions.version import Version

_WRONG = (KeyError, TypeError, ValueError, OverflowError, RecursionError, AttributeError, Warning)


def to_field(version: Version) -> str:
    """Return the header's field ``versions``: a JSON list of one object."""
    about = {
        "sink": version.fingerprint.sink,
        "prefix": [_escaped(text) for text in version.prefix],
        "inter": version.inter.tolist(),
        "intra": version.intra,
        "impact": version.impact,
        "ranks": version.ranks.tolist(),
        "expires_at": version.expires_at,
    }
    return canonical([about])


def version_in(header: Header) -> Version:
    """Return the version that the header is of, without its rows.

    Raises
    ------
    RefusedEntryError
        The field is not what :func:`to_field` makes, or of another fingerprint.
    """
    try:
        (about,) = json.loads(header.version)
        version = _version(header, about)
        whole = len(version.inter) == len(version.prefix) > 0 and sorted(
            version.ranks.tolist()
        ) == list(range(header.tokens))
    except _WRONG as error:
        raise RefusedEntryError("format", f"a version's fields: {error!r}") from error
    if not whole or to_field(version) != header.version or version.stored_as != header.fingerprint:
        raise RefusedEntryError("format", "a version's fields do not fit one another")
    return version


def _version(header: Header, about: dict[str, Any]) -> Version:
    return Version(
        header.text,
        None,
        replace(header.fingerprint, sink=about["sink"]),
        tuple(text.encode("ascii").decode("unicode_escape") for text in about["prefix"]),
        np.array(about["inter"], dtype=np.float64),
        float(about["intra"]),
        float(about["impact"]),
        np.array(about["ranks"], dtype=np.int64),
        about["expires_at"],
    )


def _escaped(text: str) -> str:
    """Return ASCII that keeps lone surrogates, even two in a row."""
    return text.encode("unicode_escape").decode("ascii")
