"""A wrapper over a model in this process loads neither the server nor its client."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from tiny import tiny_model, tiny_tokenizer
from ragkv import RagKV

kv = RagKV(tiny_model(), tiny_tokenizer(), store=":memory:")
{answer}
kv.close()
names = ("openai", "httpx", "fastapi", "uvicorn", "ragkv.client", "ragkv.serve")
print(*(name for name in names if name in sys.modules))
"""
ANSWERS = {
    "langchain": "from langchain_ragkv import ChatRagKV, RagKVLLM\n"
    "assert ChatRagKV(kv=kv, max_tokens=2).invoke('Hi').content\n"
    "assert RagKVLLM(kv=kv, max_tokens=2).invoke('Hi')",
    "llama_index": "from llama_index.llms.ragkv import RagKVLLM\n"
    "assert RagKVLLM(kv=kv, max_new_tokens=2).complete('Hi').text",
}


@pytest.mark.parametrize("framework", ANSWERS)
def test_a_model_in_this_process_needs_no_server(framework):
    code = SCRIPT.format(answer=ANSWERS[framework])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert set(done.stdout.split("\n")[-2].split()) <= {"httpx"}, "LlamaIndex's core loads that"
