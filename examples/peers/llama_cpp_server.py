"""llama.cpp's own server, from the package xllamacpp: MODEL.gguf PORT SLOTS THREADS.

A slot holds 4,096 tokens and keeps the prefix of its last prompt; prefixes of others move to
2 GiB of memory. It runs until SIGTERM or an interrupt.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp

SLOT_TOKENS = 4096
CACHE_MIB = 2048


def main(model: str, port: int, slots: int, threads: int) -> None:
    """Serve until a signal comes."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * SLOT_TOKENS
    params.kv_unified = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cont_batching = params.cache_prompt = params.use_jinja = True
    params.cache_ram_mib = CACHE_MIB
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # in the server's threads, too
    server = xllamacpp.Server(params)
    print(f"Serving at {server.listening_address}", flush=True)
    signal.sigwait(ends)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
