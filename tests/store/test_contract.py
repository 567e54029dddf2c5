"""What every store does, whatever it stands on."""

import random
from dataclasses import replace

import pytest
import torch
from store_entries import DTYPES, FINGERPRINT, OTHER, make_entry, same, without_syncs  # noqa: F401
from threads import each_in_a_thread

pytestmark = pytest.mark.usefixtures("without_syncs")


@pytest.mark.parametrize("dtype", DTYPES)
def test_returns_what_was_put(store, dtype):
    fingerprint = replace(FINGERPRINT, dtype=dtype)
    entry = make_entry("a chunk", dtype=dtype)
    assert store.put(entry, fingerprint) >= entry.nbytes
    assert store.contains("a chunk", fingerprint)
    for _ in range(2):
        lookup = store.get("a chunk", fingerprint)
        assert same(lookup.entry, entry)
        assert lookup.reason == ""


@pytest.mark.parametrize("field", ["weights", "tokenizer", "attention", "dtype", "sink", "codec"])
def test_a_hit_needs_the_whole_fingerprint(store, field):
    assert store.get("a chunk", FINGERPRINT).reason == "absent"
    store.put(make_entry("a chunk"), FINGERPRINT)
    foreign = replace(FINGERPRINT, **{field: "another"})
    lookup = store.get("a chunk", foreign)
    assert (lookup.entry, lookup.reason) == (None, "fingerprint")
    assert not store.contains("a chunk", foreign)
    assert store.get("a chunk ", FINGERPRINT).reason == "absent"


def test_keeps_one_entry_for_each_fingerprint(store):
    first, second = make_entry("a chunk"), make_entry("a chunk", layers=3)
    store.put(first, FINGERPRINT)
    store.put(second, OTHER)
    assert same(store.get("a chunk", FINGERPRINT).entry, first)
    assert same(store.get("a chunk", OTHER).entry, second)
    assert list(store.texts()) == ["a chunk"]


def test_the_last_put_counts(store):
    store.put(make_entry("a chunk", tokens=9), FINGERPRINT)
    store.put(make_entry("a chunk"), FINGERPRINT)
    assert same(store.get("a chunk", FINGERPRINT).entry, make_entry("a chunk"))


def test_delete_removes_every_entry_of_a_text(store):
    for text in ("a", "b"):
        for fingerprint in (FINGERPRINT, OTHER):
            store.put(make_entry(text), fingerprint)
    assert store.get("a", FINGERPRINT).entry is not None
    assert store.delete("a") == 2
    assert store.delete("a") == 0
    for fingerprint in (FINGERPRINT, OTHER):
        assert store.get("a", fingerprint).reason == "absent"
        assert not store.contains("a", fingerprint)
        assert same(store.get("b", fingerprint).entry, make_entry("b"))
    assert list(store.texts()) == ["b"]
    store.put(make_entry("a"), FINGERPRINT)
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))


def test_changes_tell_what_came_since(store):
    assert store.changes(0)[:2] == (0, [])
    store.put(make_entry("a"), FINGERPRINT)
    store.put(make_entry("b"), FINGERPRINT)
    first, texts, _ = store.changes(0)
    assert texts == ["a", "b"]
    assert store.changes(first)[:2] == (first, [])
    store.put(make_entry("a"), OTHER)
    store.put(make_entry("c"), FINGERPRINT)
    store.put(make_entry("d"), FINGERPRINT)
    store.delete("c")
    second, texts, _ = store.changes(first)
    assert second > first
    assert [text for text in texts if text != "a"] == ["d"]  # a came before, and may come again
    assert store.changes(first).removed == ["c"]
    assert store.changes(0)[0] == second
    assert sorted(store.changes(0)[1]) == ["a", "b", "d"]
    assert sorted(store.texts()) == ["a", "b", "d"]
    for text in ("a", "b", "d"):
        store.delete(text)
    assert list(store.texts()) == []
    assert store.changes(0)[0] >= second
    assert sorted(store.changes(second).removed) == ["a", "b", "d"]
    store.put(make_entry("d"), FINGERPRINT)
    assert sorted(store.changes(second).removed) == ["a", "b", "d"]
    assert store.changes(second)[1] == ["d"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0",
        "naïve Ω 漢字 😀",
        "\ud83d",
        "\udc00\ud800 both wrong",
        "\\ud83d\\n\\",
        "x\n" * 30_000,
    ],
    ids=ascii,
)
def test_any_text_is_a_key(store, text):
    store.put(make_entry(text), FINGERPRINT)
    assert same(store.get(text, FINGERPRINT).entry, make_entry(text))
    assert list(store.texts()) == [text]
    assert store.changes(0)[1] == [text]
    assert store.delete(text) == 1


def test_two_lone_surrogates_are_not_the_character_they_would_make(store):
    lone, whole = "\ud83d" + "\ude00", "\N{GRINNING FACE}"
    store.put(make_entry(lone), FINGERPRINT)
    assert store.get(whole, FINGERPRINT).reason == "absent"
    store.put(make_entry(whole), FINGERPRINT)
    assert same(store.get(lone, FINGERPRINT).entry, make_entry(lone))
    assert same(store.get(whole, FINGERPRINT).entry, make_entry(whole))
    assert sorted(store.texts()) == sorted([lone, whole])


def test_views_are_stored_by_their_content(store):
    plain = make_entry("a chunk", layers=2, heads=2, tokens=3)
    batch = torch.zeros(2, 5, 2, 3, 4)
    batch[:, 1], batch[:, 4] = plain.keys, plain.values
    keys, values = batch[:, 1].requires_grad_(), batch.transpose(0, 1)[4]
    store.put(replace(plain, keys=keys, values=values), FINGERPRINT)
    assert same(store.get("a chunk", FINGERPRINT).entry, plain)


def test_close_twice(store):
    store.close()
    store.close()


def test_threads_never_see_another_chunks_entry(store):
    texts = [f"chunk {number}" for number in range(6)]
    entries = {text: make_entry(text) for text in texts}
    wrong: list[object] = []
    counts: list[int] = []

    def hammer(seed):
        draw = random.Random(seed)
        try:
            for _ in range(40):
                text, action = draw.choice(texts), draw.random()
                if action < 0.3:
                    store.put(entries[text], FINGERPRINT)
                elif action < 0.4:
                    store.delete(text)
                else:
                    entry = store.get(text, FINGERPRINT).entry
                    if entry is not None and not same(entry, entries[text]):
                        wrong.append(text)
                counts.append(store.changes(0)[0])
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)

    each_in_a_thread(hammer, range(4))
    assert wrong == []
    assert len(set(texts) - set(store.texts())) + len(set(store.texts())) == len(texts)
    for text in texts:
        assert store.contains(text, FINGERPRINT) == (text in set(store.texts()))
        store.put(entries[text], FINGERPRINT)
        assert same(store.get(text, FINGERPRINT).entry, entries[text])
