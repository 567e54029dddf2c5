"""Prompt lookup decoding changes the number of steps, and nothing else."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    FAMILIES,
    LONGROPE,
    SIZE,
    random_model,
    some_chunks,
    tiny_model,
    tiny_tokenizer,
)
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from ragkv import Completion, RagKV, ReuseConfig
from ragkv.decode.draft import COSTS, LONGEST, Drafts
from ragkv.decode.loop import Loop, SeededSampling
from ragkv.decode.steps import Take
from ragkv.errors import ConfigError
from ragkv.prompt.history import TokenHistory

CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]
ANSWER = 30


class Guesses(Drafts):
    """Drafts of a given answer with wrong tokens in them, of changing lengths."""

    def __init__(self, answer: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        self._answer, self._draw = answer, np.random.default_rng(seed)

    def propose(self, history: TokenHistory, room: int, answers: int = 1) -> list[int]:
        """Continue the answer; every fourth token on average is another."""
        done = len(history) - history.prompt_tokens
        count = min(int(self._draw.integers(0, 7)), max(room, 0))
        draft = list(self._answer[done : done + count])
        return [t if self._draw.random() < 0.75 else (t + 1) % 500 for t in draft]


@contextmanager
def guessing(monkeypatch: pytest.MonkeyPatch, answer: Sequence[int]) -> Iterator[list[Guesses]]:
    made: list[Guesses] = []

    def drafts(_: object) -> Guesses:
        made.append(Guesses(answer))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr("ragkv.decode.generate.Drafts", drafts)
        yield made


def endless(engine: RagKV) -> RagKV:
    engine.loaded.model.generation_config.eos_token_id = None
    return engine


@pytest.mark.parametrize(
    ("family", "method"),
    [*((family, "query") for family in FAMILIES), *product(("llama", "gemma3"), ("full",))],
)
def test_greedy_answers_are_those_without_drafts(make_engine, monkeypatch, family, method):
    engine = endless(make_engine(family))
    engine.precompute(CHUNKS, method=method)
    settings: dict[str, Any] = {"method": method, "max_new_tokens": ANSWER}
    plain = engine.generate(PROMPT, drafts=False, **settings)
    with guessing(monkeypatch, plain.token_ids) as made:
        found = engine.generate(PROMPT, **settings)
    assert found.token_ids == plain.token_ids
    assert 0 < made[0].accepted < made[0].proposed
    looked_up = engine.generate(PROMPT, **settings)
    assert looked_up.token_ids == plain.token_ids


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_seeded_samples_are_those_without_drafts(make_engine, monkeypatch, penalty):
    """Each token is drawn once, and logits processors see the tokens before it alone."""
    engine = endless(make_engine())
    engine.loaded.model.generation_config.repetition_penalty = penalty
    engine.precompute(CHUNKS)
    settings: dict[str, Any] = {"temperature": 0.8, "top_k": 5, "max_new_tokens": ANSWER}
    for seed in range(3):
        plain = engine.generate(PROMPT, seed=seed, drafts=False, **settings)
        with guessing(monkeypatch, plain.token_ids) as made:
            found = engine.generate(PROMPT, seed=seed, **settings)
        assert found.token_ids == plain.token_ids
        assert made[0].accepted


class Table:
    """Steps whose logits are a tiny model's, computed once for each text."""

    position_limit, answers, draft_costs = None, 1, COSTS["float32"]

    def __init__(self, model: Any, known: dict[tuple[int, ...], torch.Tensor]) -> None:
        self._model, self._known = model, known

    def begin(self, prompt: list[int]) -> None:
        """Start an answer."""
        self.history = TokenHistory(np.array(prompt, dtype=np.int32))

    def run(self, take: Take) -> None:
        """Compute the prompt, then steps until the answer ends."""
        draft = take(self.after(self.history.ids.tolist())[None])
        while draft is not None:
            draft = take(self.compute(draft))

    def compute(self, draft: Sequence[int]) -> torch.Tensor:
        """Return the logits after the last token and after each of the draft."""
        ids = self.history.ids.tolist()
        return torch.stack([self.after([*ids, *draft[:end]]) for end in range(len(draft) + 1)])

    def after(self, ids: list[int]) -> torch.Tensor:
        if tuple(ids) not in self._known:
            with torch.no_grad():
                self._known[tuple(ids)] = self._model(torch.tensor([ids])).logits[0, -1].float()
        return self._known[tuple(ids)]


class AnyToken(Drafts):
    """Drafts of tokens that the model may draw, each as often as any other."""

    def __init__(self, chances: Callable[[list[int]], dict[int, float]]) -> None:
        super().__init__()
        self._chances, self._draw = chances, np.random.default_rng(0)

    def propose(self, history: TokenHistory, room: int, answers: int = 1) -> list[int]:
        """Draw tokens."""
        draft: list[int] = []
        while len(draft) < room:
            likely = list(self._chances([*history.ids.tolist(), *draft]))
            draft.append(int(self._draw.choice(likely)))
        return draft


class Silent(BaseStreamer):
    """Takes tokens, and does nothing."""

    def put(self, value: torch.Tensor) -> None:
        """Ignore it."""

    def end(self) -> None:
        """Ignore it."""


@pytest.mark.parametrize("seeded", [True, False])
def test_drafts_do_not_change_what_sampling_draws(seeded):
    """3,000 answers of three tokens, by a chi-squared test against the model's distribution."""
    prompt, top_k, temperature, draws = [5, 17, 300, 42], 3, 1.5, 3_000
    table: Any = Table(tiny_model(), {})
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)])

    @cache
    def chances_after(ids):
        scores = warpers(torch.tensor([ids]), table.after(list(ids))[None].clone())
        share = torch.softmax(scores[0].double(), -1)
        return {int(token): float(share[token]) for token in share.topk(top_k).indices}

    def chances(ids):
        return chances_after(tuple(ids))

    expected: dict[tuple[int, ...], float] = {}
    for first, p in chances(prompt).items():
        for second, q in chances([*prompt, first]).items():
            for third, r in chances([*prompt, first, second]).items():
                expected[first, second, third] = p * q * r
    config: Any = GenerationConfig(do_sample=True, max_length=len(prompt) + 3)
    stopping = StoppingCriteriaList([MaxLengthCriteria(len(prompt) + 3)])
    sampling = SeededSampling(7) if seeded else None
    torch.manual_seed(7)
    drafts, drawn = AnyToken(chances), Counter[tuple[int, ...]]()
    for _ in range(draws):
        table.begin(prompt)
        loop = Loop(table, drafts, Silent(), sampling)
        out = loop(None, torch.tensor([prompt]), warpers, stopping, config)
        drawn[tuple(out[0, len(prompt) :].tolist())] += 1
    assert set(drawn) <= set(expected)
    assert drafts.accepted > draws // 10
    counts = np.array([drawn[answer] for answer in expected])
    chance = np.array(list(expected.values()))
    often = chance * draws >= 5
    assert often.sum() > 10
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(chance[often], chance[~often].sum()) * draws
    statistic = torch.tensor(((observed - wanted) ** 2 / wanted.clip(1e-9)).sum())
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, statistic / 2) > 0.001


def test_an_answer_ends_inside_of_a_draft(make_engine, monkeypatch):
    engine = endless(make_engine())
    engine.precompute(CHUNKS)
    plain = engine.generate(PROMPT, max_new_tokens=ANSWER).token_ids
    for at in range(1, 20):
        if plain[at] in plain[:at]:
            continue
        with guessing(monkeypatch, plain):
            ended = engine.generate(PROMPT, max_new_tokens=ANSWER, stop_token_ids=[plain[at]])
            short = engine.generate(PROMPT, max_new_tokens=at)
        assert ended.token_ids == plain[: at + 1]
        assert short.token_ids == plain[:at]


def test_no_step_crosses_the_position_where_the_rotary_table_changes(monkeypatch):
    """There all keys of a pass would rotate by the other table, the last token's too."""
    model = random_model(LlamaConfig(**{**SIZE, "rope_parameters": LONGROPE}))
    first = ReuseConfig(history=False)
    with RagKV(model, tiny_tokenizer(), store=":memory:", reuse=first) as engine:
        endless(engine)
        tokens = tiny_tokenizer()(" ".join(some_chunks(3)))["input_ids"][:235]
        prompt = tiny_tokenizer().decode(tokens)
        engine.precompute([prompt[:200]])
        length = engine.prefill(prompt).report.tokens.prompt
        limit = 256
        assert length < limit < length + ANSWER
        plain = engine.generate(prompt, max_new_tokens=ANSWER, drafts=False)
        with guessing(monkeypatch, plain.token_ids) as made:
            found = engine.generate(prompt, max_new_tokens=ANSWER)
        assert found.token_ids == plain.token_ids
        assert made[0].accepted


def test_the_report_counts_steps_and_drafts(make_engine):
    engine = endless(make_engine())
    engine.precompute(CHUNKS)
    plain, found = (
        engine.generate(PROMPT, max_new_tokens=80, recompute_ratio=1.0, drafts=drafts).report
        for drafts in (False, True)
    )
    assert (plain.decode.drafted, plain.decode.accepted) == (0, 0)
    assert plain.decode.tokens_per_step == 1.0
    assert 0 < found.decode.accepted <= found.decode.drafted
    assert found.decode.tokens_per_step == pytest.approx(
        79 / (79 - found.decode.accepted), abs=0.02
    )
    for report in (plain, found):
        assert report.dtype == "float32"
        assert 0 < report.decode.seconds < 60
        assert report.decode.ms_per_token == pytest.approx(1e3 * report.decode.seconds / 79)
    one = engine.generate(PROMPT, max_new_tokens=1).report.decode
    assert (one.seconds, one.ms_per_token, one.tokens_per_step) == (0.0, 0.0, 0.0)


def test_a_streamed_answer_is_the_same(make_engine):
    engine = endless(make_engine())
    engine.precompute(CHUNKS)
    settings: dict[str, Any] = {"max_new_tokens": 100}
    expected: Completion = engine.generate(PROMPT, drafts=False, **settings)
    with engine.stream(PROMPT, **settings) as stream:
        assert "".join(stream) == expected.text
    assert stream.completion.token_ids == expected.token_ids


def test_drafts_are_on_or_off(make_engine):
    with pytest.raises(ConfigError, match="drafts must be True or False, not 4"):
        make_engine().generate(PROMPT, drafts=4)


# ---- how long drafts are


def history_of(prompt: Sequence[int]) -> TokenHistory:
    return TokenHistory(np.asarray(prompt, dtype=np.int32))


def test_drafts_continue_the_latest_of_the_longest_matches():
    history = history_of([1, 2, 3, 9, 9, 1, 2, 3, 7, 8, 2, 3, 5, 1, 2, 3])
    assert Drafts().propose(history, 2) == [7, 8]
    assert Drafts().propose(history, 1) == [7]
    assert Drafts().propose(history, 0) == []
    assert Drafts(0).propose(history, 9) == []
    assert Drafts(1).propose(history, 9) == [7]
    assert Drafts().propose(history_of([1, 2, 3]), 9) == []


@pytest.mark.parametrize("match", [1, 2, 3, 8])
def test_drafts_grow_with_what_is_taken_and_end_where_nothing_is(match):
    begin = list(range(100, 100 + match))
    history = history_of([*begin, *range(300, 340), *begin])
    lengths = {}
    for taken in (True, False):
        drafts = Drafts()
        lengths[taken] = []
        for _ in range(30):
            draft = drafts.propose(history, 40)
            lengths[taken].append(len(draft))
            if not draft:
                break
            drafts.record(len(draft), len(draft) if taken else 0)
    assert lengths[True][-1] == LONGEST
    assert lengths[True] == sorted(lengths[True])
    assert lengths[False][-1] == 0


@pytest.mark.parametrize(
    ("products", "several", "each"),
    [("float32", 1.25, 0.035), ("bfloat16", 1.15, 0.09), ("int4", 1.15, 0.13)],
)
def test_the_best_length_has_the_highest_expected_gain(products, several, each):
    for share, answers in product((0.2, 0.5, 0.6, 0.8, 0.99), (1, 2, 4, 8)):
        drafts = Drafts(20)
        drafts._taken[8], drafts._tried[8], drafts._match = share, 1.0, 8
        drafts.costs = COSTS[products]
        part = (several + 0.25 * (answers - 1)) / answers
        gains = [
            sum(share**token for token in range(length + 1)) / (part + each * length)
            for length in range(21)
        ]
        gains[0] = 1.0 if answers == 1 else 1 / part
        assert drafts._best_length(20, answers) == int(np.argmax(gains))
