"""Quality of answers from reused chunks: records to copy, hidden in prose."""

from __future__ import annotations

import logging
import pydoc_data.topics
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from math import sqrt
from statistics import mean
from typing import Literal

from ragkv.config import DecodeConfig, ReuseConfig
from ragkv.decode.listener import Listener
from ragkv.engine.plan import Clock, Request
from ragkv.engine.verify import pipeline_over
from ragkv.errors import ConfigError
from ragkv.model.architecture import is_verified
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.model.lock import lock_of
from ragkv.prompt.render import Prompt, render
from ragkv.prompt.tokens import IntArray, tokenize
from ragkv.select import method_of

_log = logging.getLogger(__name__)
KEPT, AGREEMENT = 0.9, 0.7
"""Least shares of full attention's right answers, and of its tokens, that reuse must keep."""
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
_NAMES = ("Agnes", "Boris", "Clara", "Daniel", "Edith", "Frank", "Greta", "Hugo", "Irene", "Jonas")
Shapes = dict[str, tuple[str, Callable[[random.Random], str]]]


@dataclass(frozen=True, slots=True)
class Quality:
    """Answers at a ratio.

    Attributes
    ----------
    examples
        Prompts; the right answer to each is one record.
    full_copies, copies, kept_copies
        Right answers: full attention's, the method's, and both.
    agreement
        Mean share of full attention's answer, in tokens, before the first difference.
    """

    ratio: float | Literal["auto"]
    examples: int
    full_copies: int
    copies: int
    kept_copies: int
    agreement: float

    @property
    def kept(self) -> float | None:
        """The method's share of full attention's right answers.

        None if full attention answers less than half of all prompts right: too few to judge by.
        """
        enough = 2 * self.full_copies >= self.examples
        return self.kept_copies / self.full_copies if enough else None

    @property
    def holds(self) -> bool:
        """Whether neither share is below its bound by more than a standard error."""
        copied = self.kept is None or self.kept >= least(KEPT, self.full_copies)
        return copied and self.agreement >= least(AGREEMENT, self.examples)


def least(share: float, examples: int) -> float:
    """Return a share minus the largest standard error of a mean over the examples.

    Values between 0 and 1 whose mean is ``share`` vary by at most ``share * (1 - share)``.
    """
    return share - sqrt(share * (1 - share) / examples)


def is_copied(answer: str, record: str) -> bool:
    """Whether an answer contains a record exactly, except for white space."""
    return " ".join(record.split()) in " ".join(answer.split())


def shapes(adjectives: Sequence[str], nouns: Sequence[str]) -> Shapes:
    """Return each shape's name in a sentence and its random generator; words name the places."""

    def name(draw: random.Random) -> str:
        def part() -> str:
            letters = (draw.choice(each) for each in ("bdfgklmnprstvz", "aeiou", "lnrst") * 2)
            return "".join(letters).title()

        first, second = draw.sample(_NAMES, 2)
        surname = f"{part()} {part()} {part()}-{part()}"
        return f"{first} {second} {surname} of {draw.choice(nouns).title()}ville"

    def number(draw: random.Random) -> str:
        return "-".join(f"{draw.randrange(10**4):04d}" for _ in range(5))

    def address(draw: random.Random) -> str:
        first, second, town = (draw.choice(each).title() for each in (adjectives, nouns, nouns))
        kind = draw.choice(("Street", "Road", "Lane", "Avenue"))
        house, floor, code, box = (draw.randint(10, most) for most in (999, 30, 99999, 999))
        return f"{house} {first} {second} {kind}, Floor {floor}, {code:05d} {town}ville, Box {box}"

    return {
        "name": ("owner", name),
        "number": ("account number", number),
        "address": ("postal address", address),
    }


def statement(what: str, key: str, record: str) -> str:
    """Return the sentence with a record."""
    return f"The {what} of project {key} is: {record}."


def question(what: str, key: str) -> str:
    """Return the question for a record."""
    return f"What is the {what} of project {key}? Copy it exactly, and write nothing else."


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
        request = Request(probe[0], config, method_of(config), Clock(), probe[2])
        drawn = self._pipeline.generate(request, DecodeConfig(probe[2]), listener=Listener())[1]
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
            text = "\n\n".join([*order, question(what, key)])
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
