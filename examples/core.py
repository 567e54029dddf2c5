"""The core without a framework: transformers' own generate, and ragkv beside it.

Run it with ``python examples/core.py``; the embedded model needs no download.
"""

from __future__ import annotations

import pydoc_data.topics
import time
from typing import Any

from ragkv import RagKV, ReuseConfig

TOPICS = ("with", "global", "lambda", "power")
QUESTION = "When is the __exit__ method called?"


def ordinary(
    kv: RagKV, messages: list[dict[str, str]], max_new_tokens: int
) -> tuple[str, float, float]:
    """Answer as one does with transformers: every prompt token is computed."""
    prompt: Any = kv.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    start = time.perf_counter()
    kv.loaded.model.generate(**prompt, max_new_tokens=1, do_sample=False)
    ttft = time.perf_counter() - start
    start = time.perf_counter()
    ids = kv.loaded.model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    total = time.perf_counter() - start
    answer = kv.tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(answer), ttft, total


def main(model: Any = None, tokenizer: Any = None, max_new_tokens: int = 64) -> dict[str, str]:
    """Answer one question both ways, print both, and return the answers."""
    chunks = [pydoc_data.topics.topics[topic] for topic in TOPICS]
    messages = [{"role": "user", "content": "\n\n".join([*chunks, QUESTION])}]

    with RagKV(model, tokenizer, store=":memory:", reuse=ReuseConfig(recompute_ratio=0.2)) as kv:
        kv.precompute(chunks)  # once, at ingestion
        swapped = kv.generate(messages, max_new_tokens=max_new_tokens)  # at every question
        answer, ttft, total = ordinary(kv, messages, max_new_tokens)

    report = swapped.report
    for name, first, last, text in (
        ("transformers", ttft, total, answer),
        ("ragkv", report.ttft_s, report.total_s, swapped.text),
    ):
        print(f"{name}: first token after {first:.2f} s, the answer after {last:.2f} s\n{text}\n")
    print(f"{report.tokens.reused} of {report.tokens.prompt} prompt tokens were reused.")
    return {"transformers": answer, "ragkv": swapped.text}


if __name__ == "__main__":
    main()
