"""Threads that go on when the main thread has ended: Python's own pools refuse work then."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import thread
from pathlib import Path

import pytest
from tiny import some_chunks

from ragkv import ReuseConfig, StoreConfig
from ragkv.errors import ClosedError
from ragkv.model.pool import Pool

CHUNKS = some_chunks(4)
PROMPT = "\n\n".join(CHUNKS) + "\n\nWhat does it say?"
PROGRAM = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from tiny import some_chunks, tiny_model, tiny_tokenizer
from ragkv import RagKV
kv = RagKV(tiny_model(), tiny_tokenizer(), store=sys.argv[2])
kv.loaded.model.generation_config.eos_token_id = None
kv.precompute(some_chunks(2))

def work():
    threading.main_thread().join()
    time.sleep(0.2)
    prompt = "\\n\\n".join(some_chunks(3))
    kv.precompute(["One more"])
    kv.prefetch(some_chunks(3))
    answer = kv.generate(prompt, max_new_tokens=5)
    print(len(answer.token_ids), answer.report.tokens.reused > 0, kv.contains(some_chunks(3)[2]))
    with kv.stream(prompt, max_new_tokens=5) as stream:
        list(stream)
    print(len(stream.completion.token_ids))
    kv.wait()
    kv.close()
    print("closed")

threading.Thread(target=work).start()
"""


def test_a_thread_answers_after_the_main_thread(tmp_path):
    support = Path(__file__).parents[1] / "support"
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(support), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert ran.stdout.split() == ["5", "True", "True", "5", "closed"], ran.stderr


@pytest.fixture
def main_has_ended(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(thread, "_shutdown", True)


@pytest.mark.parametrize(
    ("place", "method"),
    [("disk", "query"), ("memory", "cachecraft"), ("disk", "epic"), ("memory", "full")],
)
def test_all_of_an_engine(make_engine, main_has_ended, tmp_path, place, method):
    reuse = ReuseConfig(method=method)
    store = StoreConfig(":memory:" if place == "memory" else str(tmp_path / "store"))
    before, after = make_engine(reuse=reuse), make_engine(reuse=reuse, store=store)
    answers = []
    for kv in (before, after):
        if kv is after:
            main_has_ended()
        kv.precompute(CHUNKS[:3])
        kv.prefetch(CHUNKS)
        for _ in range(2):
            kv.wait()
            answers.append(kv.generate(PROMPT, max_new_tokens=4).token_ids)
    assert answers[:2] == answers[2:]
    assert kv.contains(CHUNKS[3])
    kv.wait()
    kv.close()
    with pytest.raises(ClosedError):
        kv.generate(PROMPT)


def test_work_is_done_here(main_has_ended):
    with Pool(2) as pool:
        assert list(pool.map(str, range(3))) == ["0", "1", "2"]
        main_has_ended()
        assert list(pool.map(str, range(3))) == ["0", "1", "2"]
        assert isinstance(pool.submit(int, "x").exception(), ValueError)
    with pytest.raises(RuntimeError):
        pool.submit(int, "1")
