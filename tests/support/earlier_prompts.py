"""Chats that ask again, what they leave, and how their rows compare with a full prefill."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny import some_chunks
from transformers.cache_utils import DynamicCache

from ragkv import Completion, RagKV, ReuseConfig
from ragkv.engine import healing, planner
from ragkv.engine.plan import Plan
from ragkv.history.node import EXACT
from ragkv.history.tree import ComputedPrompt, PrefixTree
from ragkv.model.calls import cache_argument
from ragkv.select import get_method, method_names
from ragkv.splice.layout import Origin

Make = Callable[..., RagKV]
Chat = list[dict[str, str]]
CHUNKS = some_chunks(3)
TOLERANCE = 5e-5
PLACING = [name for name in method_names() if get_method(name).uses_chunks]


@pytest.fixture
def make_engine(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make engines that use history and heal nothing: what is known is what prompts computed."""
    monkeypatch.setattr(healing, "ENOUGH", 1 << 30)
    return partial(make_engine, reuse=ReuseConfig())


def ask(question: str = "What does the text say?", chunks: list[str] = CHUNKS) -> Chat:
    return [{"role": "user", "content": "\n\n".join([*chunks, question])}]


def and_then(chat: Chat, answer: Completion, question: str = "And then?") -> Chat:
    """Without blanks that would become one token with the end of the prompt."""
    return [
        *chat,
        {"role": "assistant", "content": answer.text.lstrip()},
        {"role": "user", "content": question},
    ]


def full(engine: RagKV, ids: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a full prefill's logits, and its keys and values ``[layers, kv_heads, tokens, ...]``."""
    cache = DynamicCache()
    with torch.no_grad():
        given = torch.tensor(np.asarray(ids)[None].astype(np.int64))
        out = engine.loaded.model(given, **cache_argument(engine.loaded.model, cache))
    parts = ([getattr(layer, part)[0] for layer in cache.layers] for part in ("keys", "values"))
    return out.logits[0, -1].float(), *map(torch.stack, parts)


def assert_full(engine: RagKV, out: Any) -> None:
    expected, *_ = full(engine, out.token_ids)
    assert float((out.logits - expected).abs().max()) < TOLERANCE


def taken(answer: Any) -> int:
    return int(answer.report.tokens.history_exact + answer.report.tokens.history_repaired)


def sources(answer: Any) -> list[str]:
    return [use.source for use in answer.report.chunks]


def is_earlier_behind(answer: Any, text: str) -> bool:
    """Whether any row from a text's first token on is an earlier prompt's."""
    report = answer.report
    behind = report.trace.offsets[:, 1] > report.trace.text.index(text)
    origin = np.frombuffer(report.positions, np.uint8)
    return bool((behind & np.isin(origin, (Origin.EXACT, Origin.REPAIRED))).any())


def paths(engine: RagKV) -> list[str]:
    """Return the text of each path in the tree, down to each of its nodes."""
    found, waiting = [], list(engine._reuse.history._tree._roots.values())
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        ids = [each for part in reversed(node.path()) for each in part.ids.tolist()]
        found.append(engine.tokenizer.decode(ids))
    return found


def assert_adds_up(answer: Any) -> None:
    report = answer.report
    tokens = report.tokens
    of_entries = [tokens.sink, tokens.reused, tokens.recomputed, tokens.fresh]
    of_history = [tokens.history_exact, tokens.history_repaired, tokens.version]
    counts = np.bincount(list(report.positions), minlength=len(Origin)).tolist()
    assert counts == of_entries + of_history
    assert len(report.positions) == tokens.prompt
    assert tokens.cached + tokens.recomputed + tokens.fresh == tokens.prompt
    for use in report.chunks:
        within = list(report.positions[use.start : use.end])
        assert use.recomputed == within.count(Origin.RECOMPUTED)
        assert use.reused == len(within) - use.recomputed - within.count(Origin.FRESH)


@dataclass
class Left:
    """What a prompt left: copies, as it was when its answer was finished."""

    plan: Plan
    ids: np.ndarray
    freshness: np.ndarray
    both: torch.Tensor

    @property
    def exact(self) -> int:
        return [*(self.freshness == EXACT), False].index(False)

    def rows(self, positions: Any) -> torch.Tensor:
        """``[2, layers, kv_heads, rows, head_dim]``: keys and values."""
        return self.both[:, :, :, positions]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Left]:
    found, plans = list[Left](), list[Plan]()
    left_rows, add = planner.left_rows, PrefixTree.add

    def kept(request: Any, plan: Plan, *given: Any, **more: Any) -> ComputedPrompt | None:
        plans.append(plan)
        return left_rows(request, plan, *given, **more)

    def added(tree: PrefixTree, new: ComputedPrompt) -> None:
        both = torch.stack([part[:, :, : len(new.ids)] for part in new.rows])
        found.append(Left(plans[-1], new.ids, new.freshness, both))
        add(tree, new)

    monkeypatch.setattr(planner, "left_rows", kept)
    monkeypatch.setattr(PrefixTree, "add", added)
    return found


def by_question(scene: Any) -> np.ndarray:
    """Rank tokens by nothing but the prompt's text."""
    draw = np.random.default_rng(zlib.crc32(scene.text.encode()))
    return draw.random(len(scene.layout.cached)).astype(np.float32)


def by_place(scene: Any) -> np.ndarray:
    """The same for all questions, first tokens first."""
    return -scene.layout.cached.astype(np.float32)


def ask_apart(question: str = "What does the text say?") -> Chat:
    """With no chunk right behind the sink, where its entry would be exact."""
    return ask(question, [f"Read this.\n\n{CHUNKS[0]}", *CHUNKS[1:]])


DRIFTING = replace(get_method("query"), name="drifting", score=by_question, sparse=None)
