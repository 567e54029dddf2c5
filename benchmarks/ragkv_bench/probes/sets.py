"""From the names of probes to their examples."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv.errors import ConfigError
from ragkv_bench.data.examples import DataSet, Example
from ragkv_bench.data.needles import Hide, hidden_example, measured, sentences
from ragkv_bench.probes import abstention, aggregation, copies, length

if TYPE_CHECKING:
    from ragkv import RagKV

PROBES: dict[str, Mapping[str, Hide]] = {
    "copies": copies.KINDS,
    "abstention": abstention.KINDS,
    "aggregation": aggregation.KINDS,
    "length": length.KINDS,
}
TOKENS = (2048,)
"""Lengths of all probes but ``length``, unless others are given."""


@dataclass(frozen=True, slots=True)
class ProbeSet:
    """The examples of a probe at one length, by kind; ``tokens`` is None for a file's."""

    probe: str
    tokens: int | None
    kinds: Mapping[str, Sequence[Example]]

    @property
    def data(self) -> DataSet:
        """All examples."""
        name = self.probe if self.tokens is None else f"{self.probe}-{self.tokens}"
        return DataSet(name, tuple(each for kind in self.kinds.values() for each in kind))


def probe_sets(
    kv: RagKV,
    names: Sequence[str],
    haystack: str,
    lengths: Sequence[int] = (),
    *,
    count: int,
    seed: int = 0,
    data: DataSet | None = None,
) -> list[ProbeSet]:
    """Make the examples of probes over a text; the same arguments give the same examples.

    Parameters
    ----------
    lengths
        Of prompt and longest answer together, in tokens, a set each; none: the probes' own.
    count
        Examples of a set, shared evenly among its kinds.
    data
        Examples whose gold chunks ``abstention`` removes, in place of made ones.

    Raises ConfigError: a probe does not exist, none uses ``data`` or it has no gold chunk beside
    others, the text is empty, or a length exceeds the model's positions or leaves no room.
    """
    if not names or not PROBES.keys() >= set(names):
        unknown = ", ".join(name for name in names if name not in PROBES)
        raise ConfigError(f"--probe takes {', '.join(PROBES)}, not {unknown or 'nothing'}")
    if data is not None and "abstention" not in names:
        raise ConfigError("--data changes nothing without the probe abstention: omit it")
    hay = measured(sentences(haystack), kv.tokenizer)
    if not hay:
        raise ConfigError("the haystack has no text")
    sets = []
    for name in dict.fromkeys(names):
        if name == "abstention" and data is not None:
            sets.append(ProbeSet(name, None, abstention.without_gold(data, count, seed)))
            continue
        sizes = lengths if name == "length" else lengths or TOKENS
        for tokens in length.within(kv.info.positions, sizes, kv.info.name):
            kinds: dict[str, list[Example]] = {kind: [] for kind in PROBES[name]}
            for number, kind in zip(range(count), itertools.cycle(kinds), strict=False):
                own = f"{name}_{kind}_{tokens}_{seed}_{number:04d}"
                made = hidden_example(hay, kv.tokenizer, PROBES[name][kind], tokens, own)
                kinds[kind].append(made)
            sets.append(ProbeSet(name, tokens, kinds))
    return sets
