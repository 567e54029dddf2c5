"""Quality of answers from reused chunks: records to copy, hidden in prose."""

from __future__ import annotations

import logging
import pydoc_data.topics
import random
from collections.abc import Sequence
from itertools import chain, cycle, islice
from statistics import mean
from typing import Literal

from ragkv.config import DecodeConfig, ReuseConfig
from ragkv.decode.listener import Listener
from ragkv.engine.check.records import request, shapes, statement
from ragkv.engine.check.verify import pipeline_over
from ragkv.engine.request import Request
from ragkv.errors import ConfigError
from ragkv.model.architecture import is_verified
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.model.lock import lock_of
from ragkv.prompt.render import Prompt, render
from ragkv.prompt.tokens import IntArray, tokenize
from ragkv.report.clock import Clock
from ragkv.report.quality import Quality, is_copied
from ragkv.select import method_of

_log = logging.getLogger(__name__)
LARGER = (0.3, 0.5, 0.7)
"""Ratios that are tried if the configured one does not hold."""
_SIZES = ((5, 36), (5, 20), (5, 7), (2, 7), (2, 2))
"""Chunks of a prompt, and words around each record; the first pair that fits the model is used."""
_QUICK_SIZES = _SIZES[3:]
_WORDS = ("amber", "beetle", "candle", "desert", "ember", "forest", "garden", "hollow", "island")
_GARBLED = (
    "%s gives different answers from reused chunks at a ratio of %s: %.2f of an answer precedes "
    "the first difference. `ragkv check --quality --model %s` finds the necessary ratio."
)
_PROBED = set[str]()  # fingerprints
_Probe = tuple[Prompt, str, int]  # prompt, record, and the answer's most tokens


class Probes:
    """Prompts over chunks in memory, each with a different order of chunks and a different record.

    Parameters
    ----------
    quick
        Use three short prompts with answers of few tokens.

    Raises
    ------
    ConfigError
        The model has too few positions.
    """

    def __init__(self, loaded: ReusableModel, *, quick: bool = False) -> None:
        self._tokenizer = loaded.tokenizer
        for count, words in _QUICK_SIZES if quick else _SIZES:
            chunks, self._probes = self._made(count, words, quick=quick)
            longest = max(len(self._ids(prompt)) + most for prompt, _, most in self._probes)
            if longest <= (loaded.positions or longest):
                break
        else:
            raise ConfigError(f"probes need {longest} positions, the model has {loaded.positions}")
        self._pipeline = pipeline_over(loaded, chunks)
        self._full = [self._answer(probe, ReuseConfig(method="full")) for probe in self._probes]

    def at(self, config: ReuseConfig) -> Quality:
        """Answer the prompts by a method without an auxiliary model."""
        own = [self._answer(probe, config) for probe in self._probes]
        pairs = list(zip(self._full, own, strict=True))
        return Quality(
            config.recompute_ratio,
            len(own),
            sum(is_right for _, is_right in self._full),
            sum(is_right for _, is_right in own),
            sum(of_full[1] and of_own[1] for of_full, of_own in pairs),
            mean(_share_before_difference(of_full[0], of_own[0]) for of_full, of_own in pairs),
        )

    def _answer(self, probe: _Probe, config: ReuseConfig) -> tuple[list[int], bool]:
        """Return the answer's tokens, and whether they contain the record."""
        question = Request(probe[0], config, method_of(config), Clock(), probe[2])
        drawn = self._pipeline.generate(question, DecodeConfig(probe[2]), listener=Listener())[1]
        text = str(self._tokenizer.decode(drawn.token_ids))
        return drawn.token_ids, is_copied(text, probe[1])

    def _made(self, count: int, words: int, *, quick: bool) -> tuple[list[str], list[_Probe]]:
        draw = random.Random(0)  # noqa: S311  seeded, not secret
        keys = draw.sample([f"{a}-{b}" for a in _WORDS for b in _WORDS], 2 * count)
        kinds = cycle(shapes(_WORDS, _WORDS).values())
        records = [(what, key, make(draw)) for key, (what, make) in zip(keys, kinds, strict=False)]
        prose = iter(pydoc_data.topics.topics["assignment"].split())
        chunks, probes = list[str](), list[_Probe]()
        for at in range(0, 2 * count, 2):
            parts = [[*islice(prose, words), statement(*each)] for each in records[at : at + 2]]
            chunks.append(" ".join(chain(*parts, islice(prose, words))))
        for what, key, record in islice(cycle(records), 3 if quick else 8):
            order = draw.sample(chunks, count)
            if key in order[0]:  # the requested record is behind other chunks
                order.reverse()
            text = "\n\n".join([*order, request(what, key)])
            prompt: Prompt = f"{text}\n\n"
            if self._tokenizer.chat_template:
                prompt = [{"role": "user", "content": text}]
            # the prompt contains the answer's beginning, so that reasoning models copy at once, too
            begun = render(prompt, self._tokenizer).text
            begun += statement(what, key, record).partition(f" {record}")[0]
            if self._ids(begun)[0] == self._ids(prompt)[0]:  # no second BOS
                prompt = begun
            probes.append((prompt, record, 8 if quick else len(self._ids(record)) + 4))
        return chunks, probes

    def _ids(self, prompt: Prompt) -> IntArray:
        return tokenize(render(prompt, self._tokenizer), self._tokenizer).ids


def _share_before_difference(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the share of ``first`` before its first difference from ``second``."""
    for place, token in enumerate(first):
        if second[place : place + 1] != [token]:
            return place / len(first)
    return 1.0


def measure(loaded: ReusableModel, ratio: float | Literal["auto"]) -> list[Quality]:
    """Probe the default method at a ratio, then at larger ratios until one holds.

    Raises
    ------
    ConfigError
        The model has too few positions.
    """
    with lock_of(loaded.model), loaded.without_autocast():
        probes = Probes(loaded)
        found = [probes.at(ReuseConfig(recompute_ratio=ratio))]
        for larger in LARGER:
            if not found[-1].holds and (ratio == "auto" or larger > ratio):
                found.append(probes.at(ReuseConfig(recompute_ratio=larger)))
    return found


def warn_if_garbled(loaded: LoadedModel, config: ReuseConfig) -> None:
    """Warn once if reuse garbles the answers of a model that the tests do not cover."""
    if not isinstance(loaded, ReusableModel) or is_verified(loaded.model):
        return
    digest, used = loaded.fingerprint.digest, config.override(sink="auto")
    if digest in _PROBED or not method_of(config).uses_chunks:
        return
    _PROBED.add(digest)
    try:
        with lock_of(loaded.model), loaded.without_autocast():
            found = Probes(loaded, quick=True).at(used)
    except Exception:  # noqa: BLE001  an unknown model can raise anything
        _log.info("%s could not be probed", loaded.name, exc_info=True)
        return
    if not found.holds:
        _log.warning(_GARBLED, loaded.name, used.recompute_ratio, found.agreement, loaded.name)
