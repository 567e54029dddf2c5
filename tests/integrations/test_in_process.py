"""A wrapper over a model in this process loads neither the server nor its client."""

from fresh import output_of

SCRIPT = """
import sys
from tiny import tiny_model, tiny_tokenizer
from ragkv import RagKV

kv = RagKV(tiny_model(), tiny_tokenizer(), store=":memory:")
names = ("openai", "httpx", "fastapi", "uvicorn", "ragkv.client", "ragkv.serve")

def loaded():
    print(*(name for name in names if name in sys.modules), sep=",")

from langchain_ragkv import ChatRagKV, RagKVLLM
assert ChatRagKV(kv=kv, max_tokens=2).invoke("Hi").content
assert RagKVLLM(kv=kv, max_tokens=2).invoke("Hi")
loaded()
from llama_index.llms.ragkv import RagKVLLM
assert RagKVLLM(kv=kv, max_new_tokens=2).complete("Hi").text
loaded()
kv.close()
"""


def test_a_model_in_this_process_needs_no_server():
    lines = output_of(SCRIPT, PYTHONWARNINGS="ignore").splitlines()
    langchain, both = (set(filter(None, line.split(","))) for line in lines[-2:])
    assert langchain | both <= {"httpx"}, "LlamaIndex's core loads that"
