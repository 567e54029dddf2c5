"""Retrieval in stages: the prompt of the first hits is computed while a reranker works."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

import faiss
import numpy as np

from ragkv import RagKV
from ragkv.retrieve.following import follow
from ragkv.retrieve.staged import StagedSearch

QUESTION = "When is the else clause of a for loop executed?"


def embed(text: str) -> Any:
    """Compare words, so that the example downloads nothing; take a real embedding."""
    words = {zlib.crc32(word.encode()) % 256 for word in re.findall(r"\w{4,}", text.lower())}
    return np.array([at in words for at in range(256)], dtype=np.float32) / len(words) ** 0.5


def prompt_of(found: Sequence[str]) -> list[dict[str, str]]:
    """Return the prompt that will be asked with these chunks."""
    return [{"role": "user", "content": "\n\n".join([*found, QUESTION])}]


def main(model: Any = None, tokenizer: Any = None, max_new_tokens: int = 32) -> dict[str, str]:
    """Answer without computing ahead and with it, and return both answers."""
    chunks = [topics["compound"][at : at + 1200].strip() for at in range(0, 12000, 1200)]
    index = faiss.index_factory(256, "HNSW16")
    index.add(np.stack([*map(embed, chunks)]))
    search = StagedSearch(index, chunks, embed, k=4, steps=2)

    def stages() -> Iterator[list[str]]:
        for hits in search(QUESTION):
            yield [hit.item for hit in hits]
        time.sleep(0.5)  # a reranker, which agrees
        yield [hit.item for hit in hits]

    answers = {}
    for name in ("plain", "ahead"):
        with RagKV(model, tokenizer, store=":memory:") as kv:
            kv.precompute(chunks)
            began = time.perf_counter()
            found = follow(kv, stages(), prompt_of) if name == "ahead" else [*stages()][-1]
            wait_s = time.perf_counter() - began
            answer = kv.generate(prompt_of(found), max_new_tokens=max_new_tokens)
        answers[name], report = answer.text, answer.report
        print(f"{name}: first token {wait_s + report.ttft_s:.2f} s ({report.reused_tokens} reused)")
    return answers


if __name__ == "__main__":
    main()
