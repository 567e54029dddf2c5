"""Forks of a process that has computed with several threads: a script, ``forks.py FOLDER``.

Prints for each case what the child answered, as JSON; a child that hangs is ended. A process of its
own, since pytest's have threads and locks that a fork does not survive.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable

import httpx
import torch
from pausing import Pause
from stub_server import VERSION, Stub, text_events
from tiny import saved, some_chunks

from ragkv import RagKV, ReuseConfig
from ragkv.client import RemoteRagKV
from ragkv.errors import ClosedError
from ragkv.model import lock
from ragkv.model.loaded import LoadedModel

LIMIT_S = 60
CHUNKS = some_chunks(6)
PROMPT = "\n\n".join(CHUNKS[:3]) + "\n\nWhat now?"
LOADED: LoadedModel


def answer(model: LoadedModel | str) -> list[int]:
    """Answer from chunks, with an engine of its own."""
    reuse = ReuseConfig(history=False)
    with RagKV(model, store=":memory:", reuse=reuse) as kv:
        kv.precompute(CHUNKS[:3])
        torch.randn(600, 600).exp().mm(torch.randn(600, 600))
        return kv.generate(PROMPT, max_new_tokens=4, recompute_ratio=1.0).token_ids


def answer_of_loaded(_: int) -> list[int]:
    """Answer with the model that was loaded before the fork."""
    return answer(LOADED)


def forked(work: Callable[[], object]) -> object:
    """Return what ``work`` returns in a fork; an exit code that is not 0 is returned, too."""
    own, end = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(LIMIT_S)
        os.write(end, json.dumps(work()).encode())
        os._exit(0)
    os.close(end)
    with os.fdopen(own, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(said) if code == 0 else f"exit code {code}"


def after_products() -> object:
    """Torch's own products leave a pool of threads."""
    torch.randn(600, 600).exp().mm(torch.randn(600, 600))
    return forked(lambda: answer(LOADED))


def after_answers() -> object:
    """The model was loaded before, and has answered."""
    answer(LOADED)
    return forked(lambda: answer(LOADED))


def in_a_pool() -> object:
    """A pool of forked workers, as multiprocessing makes them on Linux."""
    torch.randn(600, 600).exp()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        first, second = pool.map_async(answer_of_loaded, range(2)).get(LIMIT_S)
    return first if first == second else [first, second]


def loaded_in_the_fork() -> object:
    """The fork loads the model itself."""
    torch.randn(600, 600).exp()
    return forked(lambda: answer(sys.argv[1]))


def while_healing() -> object:
    """The other thread computes: the fork waits until it has stopped between two layers."""
    with RagKV(LOADED, store=":memory:") as kv:
        pause = Pause(kv, "ragkv-idle")
        kv.precompute(CHUNKS)
        kv.prefetch(CHUNKS)
        assert pause.reached.wait(LIMIT_S)
        threading.Timer(0.3, pause.go.set).start()
        answered = forked(lambda: answer(LOADED))
        assert pause.go.is_set()
        return answered


def while_another_thread_holds_the_model() -> object:
    """It is not waited for endlessly, and is not in the fork."""
    holding, done = threading.Event(), threading.Event()
    with RagKV(LOADED, store=":memory:") as kv:

        def hold() -> None:
            with kv.turn():
                holding.set()
                done.wait(LIMIT_S)

        holder = threading.Thread(target=hold)
        holder.start()
        assert holding.wait(LIMIT_S)
        lock.FORK_WAIT_S = 0.2
        answered = forked(lambda: answer(LOADED))
        done.set()
        holder.join()
    return answered


def the_same_engine() -> object:
    """An engine lacks its threads in a fork, and says so; closing it there does nothing."""
    with RagKV(LOADED, store=sys.argv[1] + "/store") as kv:
        kv.precompute(CHUNKS)

        def ask() -> str:
            try:
                kv.generate(PROMPT)
            except ClosedError as error:
                kv.close()
                return str(error)
            return "no error"

        with kv._lifecycle._changed:  # as another thread may hold it at that moment
            said = forked(ask)
        assert kv.contains(CHUNKS[0])
    return said


def a_client() -> object:
    """A client of a server has connections of its own in a fork."""
    answers = {"GET /version": [VERSION], "POST /v1/completions": [text_events("Hel", "lo")]}
    kv = RemoteRagKV("http://host:8000", transport=httpx.MockTransport(Stub(answers)))
    assert kv.info.name == "tiny"
    said = forked(lambda: kv.generate("Hi").text)
    kv.close()
    return said


CASES = (
    after_products,
    after_answers,
    in_a_pool,
    loaded_in_the_fork,
    while_healing,
    while_another_thread_holds_the_model,
    the_same_engine,
    a_client,
)

if __name__ == "__main__":
    torch.set_num_threads(4)
    saved(sys.argv[1])
    with RagKV(sys.argv[1], store=":memory:") as first:
        LOADED = first.loaded
    results = {"expected": answer(LOADED)} | {case.__name__: case() for case in CASES}
    sys.stdout.write(json.dumps(results))
