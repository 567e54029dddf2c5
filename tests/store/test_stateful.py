"""A tiered store over a backend, against a plain dictionary, in any order of calls of two processes."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import hypothesis.strategies as st
from disk_store import tiered
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_entries import FINGERPRINT, OTHER, make_entry, same

from ragkv.model.fingerprint import Fingerprint
from ragkv.store.backends.memory import MemoryBackend, Place
from ragkv.store.tiers.tier import MemoryTier, size_of
from ragkv.store.types import Terms

NAMES = ("a", "b", "c", "d", "e")
TEXTS = st.sampled_from(NAMES)
FINGERPRINTS = st.sampled_from([FINGERPRINT, OTHER])
DOCUMENTS = st.sampled_from(["one", "two"])
LIVES = st.none() | st.integers(1, 30)
SIZE = size_of(make_entry("a"))
TIERS = ([0], [3000], [1 << 20], [2 * SIZE, 3 * SIZE])
"""Budgets in bytes, the device's first where there are two."""


@dataclass
class Chunk:
    """What the dictionary knows of a text."""

    tokens: dict[Fingerprint, int] = field(default_factory=dict)
    documents: set[str] = field(default_factory=set)
    expires_at: float | None = 0.0


class Stores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1e6
        clock = SimpleNamespace(time=lambda: self.now)
        self.patches = [
            mock.patch(f"ragkv.store.{module}.time", clock)
            for module in ("chunk_store", "tiers.tier")
        ]
        for patch in self.patches:
            patch.start()
        self.place = Place()
        self.model: dict[str, Chunk] = {}

    @initialize(budgets=st.sampled_from(TIERS), admission=st.booleans())
    def start(self, budgets: list[int], admission: bool) -> None:
        self.budgets, self.admission = budgets, admission
        self.open()

    def open(self) -> None:
        self.finder, self.seen = set(), 0
        tiers = [MemoryTier(budget, admission=self.admission) for budget in self.budgets]
        self.store = tiered(MemoryBackend(self.place), *tiers)
        self.other = tiered(MemoryBackend(self.place), 2 * SIZE)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule(seconds=st.integers(-50, 50))
    def set_clock(self, seconds: int) -> None:
        self.now += seconds

    @rule(
        text=TEXTS,
        fingerprint=FINGERPRINTS,
        tokens=st.integers(1, 9),
        document=st.none() | DOCUMENTS,
        life=LIVES,
        elsewhere=st.booleans(),
    )
    def put(
        self,
        text: str,
        fingerprint: Fingerprint,
        tokens: int,
        document: str | None,
        life: int | None,
        elsewhere: bool,
    ) -> None:
        """Here, or in another process, which replaces what is there with the same."""
        chunk = self.model.get(text)
        if elsewhere and chunk is not None:
            tokens = chunk.tokens.get(fingerprint, tokens)
        store = self.other if elsewhere else self.store
        expires_at = None if life is None else self.now + life
        entry = make_entry(text, tokens=tokens)
        assert store.put(entry, fingerprint, Terms(document, expires_at)) > 0
        chunk = self.model.setdefault(text, Chunk())
        chunk.tokens[fingerprint] = tokens
        self.hold_in_model(chunk, document, expires_at)

    @rule(text=TEXTS, fingerprint=FINGERPRINTS, document=st.none() | DOCUMENTS, life=LIVES)
    def retain(
        self, text: str, fingerprint: Fingerprint, document: str | None, life: int | None
    ) -> None:
        expires_at = None if life is None else self.now + life
        there = self.reason(text, fingerprint) == ""
        held = self.store.retain(text, fingerprint, Terms(document, expires_at))
        assert held == there
        if there:
            self.hold_in_model(self.model[text], document, expires_at)

    def hold_in_model(self, chunk: Chunk, document: str | None, expires_at: float | None) -> None:
        if document is not None:
            chunk.documents.add(document)
        if chunk.expires_at is not None:
            chunk.expires_at = None if expires_at is None else max(chunk.expires_at, expires_at)

    @rule(text=TEXTS, elsewhere=st.booleans())
    def delete(self, text: str, elsewhere: bool) -> None:
        gone = self.model.pop(text, Chunk())
        store = self.other if elsewhere else self.store
        assert store.delete(text) == len(gone.tokens)

    @rule(document=DOCUMENTS, kept=st.none() | st.sets(TEXTS))
    def keep_only(self, document: str, kept: set[str] | None) -> None:
        gone = []
        for text, chunk in self.model.items():
            if document in chunk.documents and text not in (kept or ()):
                chunk.documents.discard(document)
                if not chunk.documents:
                    gone.append(text)
        for text in gone:
            del self.model[text]
        if kept is None:
            assert self.store.forget_document(document) == len(gone)
        else:
            assert self.store.keep_only(document, kept) == len(gone)

    @rule()
    def gc(self) -> None:
        expired = [text for text, chunk in self.model.items() if self.expired(chunk)]
        for text in expired:
            del self.model[text]
        assert self.store.gc() == len(expired)

    @rule(text=TEXTS, fingerprint=FINGERPRINTS)
    def get(self, text: str, fingerprint: Fingerprint) -> None:
        lookup = self.store.get(text, fingerprint)
        assert lookup.reason == self.reason(text, fingerprint)
        assert (lookup.entry is None) == (lookup.reason != "")
        if lookup.entry is not None:
            tokens = self.model[text].tokens[fingerprint]
            assert same(lookup.entry, make_entry(text, tokens=tokens))

    def reason(self, text: str, fingerprint: Fingerprint) -> str:
        chunk = self.model.get(text)
        if chunk is None or self.expired(chunk):
            return "absent" if chunk is None else "expired"
        return "" if fingerprint in chunk.tokens else "fingerprint"

    def expired(self, chunk: Chunk) -> bool:
        return chunk.expires_at is not None and chunk.expires_at <= self.now

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        before = self.seen
        self.seen, came, removed = self.store.changes(before)
        assert self.seen >= before
        self.finder.difference_update(removed)
        self.finder.update(came)
        assert self.finder == set(self.model)
        assert sorted(self.store.texts()) == sorted(self.model)
        found = {
            (entry.text, entry.fingerprint): (set(entry.documents), entry.expires_at)
            for entry in self.store.entries()
        }
        assert found == {
            (text, fingerprint.digest): (chunk.documents, chunk.expires_at)
            for text, chunk in self.model.items()
            for fingerprint in chunk.tokens
        }
        assert all(tier.nbytes <= tier.budget for tier in self.store.tiers)
        for text in NAMES:
            for fingerprint in (FINGERPRINT, OTHER):
                there = self.reason(text, fingerprint) == ""
                assert self.store.contains(text, fingerprint) == there

    def teardown(self) -> None:
        for patch in self.patches:
            patch.stop()


Stores.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestStores = Stores.TestCase
