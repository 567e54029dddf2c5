"""Retrieval in stages: the prompt of the first hits is computed while a reranker works.

Run it with ``python examples/staged_retrieval.py``; nothing is downloaded.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

import faiss
import numpy as np

from ragkv import RagKV, StagedSearch

QUESTION = "When is the else clause of a for loop executed?"
RERANKER_S = 0.5


def embed(text: str) -> list[float]:
    """Compare words, so that the example downloads nothing; take a real embedding."""
    words = {zlib.crc32(word.encode()) % 256 for word in re.findall(r"\w{4,}", text.lower())}
    vector = np.array([at in words for at in range(256)], dtype=np.float32)
    return list(vector / max(1.0, float(np.linalg.norm(vector))))


def prompt_of(found: Sequence[str]) -> list[dict[str, str]]:
    """Return the prompt that will be asked with these chunks."""
    return [{"role": "user", "content": "\n\n".join([*found, QUESTION])}]


def main(model: Any = None, tokenizer: Any = None, max_new_tokens: int = 32) -> dict[str, str]:
    """Answer with and without computing ahead, and return both answers."""
    kv = RagKV(model, tokenizer, store=":memory:")
    texts = [topics[name] for name in ("for", "while", "try", "with")]
    chunks = [text[at : at + 1200].strip() for text in texts for at in range(0, len(text), 1200)]
    kv.precompute(chunks)
    index = faiss.index_factory(256, "IVF4,Flat")
    vectors = np.array([embed(chunk) for chunk in chunks], dtype=np.float32)
    index.train(vectors)
    index.add(vectors)
    index.nprobe = 4
    search = StagedSearch(index, chunks, embed, k=4, steps=4)

    def stages() -> Iterator[list[str]]:
        for hits in search(QUESTION):
            yield [hit.item for hit in hits]
        time.sleep(RERANKER_S)  # the reranker, which mostly agrees
        yield [hit.item for hit in hits]

    answers = {}
    for name in ("plain", "ahead"):
        began = time.perf_counter()
        found = kv.follow(stages(), prompt_of) if name == "ahead" else list(stages())[-1]
        retrieved = time.perf_counter() - began
        answer = kv.generate(prompt_of(found), max_new_tokens=max_new_tokens)
        answers[name] = answer.text
        report = answer.report
        print(f"{name}: first token {retrieved + report.ttft_s:.2f} s after the question,")
        print(f"{report.ahead_s:.2f} s computed ahead, {report.reused_tokens} tokens reused")
    kv.close()
    return answers


if __name__ == "__main__":
    main()
