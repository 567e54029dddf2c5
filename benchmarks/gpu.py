"""What ragkv brings on a GPU: first tokens and an answer of a 7B's shape with random weights.

`make gpu` runs it behind the tests with the marker ``gpu``. Speed depends on shapes, not on what
the weights say, so nothing is downloaded. Prompts are of real text in chunks of 512 tokens, whose
entries lie on the device; each prompt has another order of them. "plain" is a call of the model by
transformers over a length that it has seen, with torch's own attention and without cuDNN's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from ragkv import RagKV, ReuseConfig
from ragkv.model.default_model import default_model_folder
from ragkv_bench.speed.traces import RequestTrace, make_traces

SHAPES: dict[str, dict[str, int]] = {
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 49_152,
    },
}
RATIOS = (0.0, 0.1, 0.2)
WARM_UPS = 3
"""Prompts before those that count: their passes are captured as graphs."""
ANSWER_TOKENS = 128


def random_model(shape: str, device: torch.device) -> Any:
    """Return a model of a shape with random weights, bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=131_072)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call and what it queued take."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


@torch.inference_mode()
def plain_ms(kv: RagKV, trace: RequestTrace, *, cudnn: bool) -> float:
    """Return the median of three ordinary calls over a prompt, in milliseconds."""
    ids = torch.tensor([trace.ids[0]], device=kv.loaded.device)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        times = [seconds(lambda: kv.loaded.model(ids, logits_to_keep=1)) for _ in range(4)]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    return 1000 * statistics.median(times[1:])


def first_tokens(kv: RagKV, trace: RequestTrace, ratio: float) -> dict[str, Any]:
    """Return the median time to a prompt's first token and its parts, in milliseconds."""
    times, steps = [], []

    def ask(prompt: Any) -> None:
        answer = kv.generate(prompt, max_new_tokens=1, recompute_ratio=ratio, sink=trace.sink)
        steps.append(answer.report.steps)

    times = [seconds(lambda each=each: ask(each)) for each in trace.prompts]
    kept = steps[WARM_UPS:]
    parts = {name: 1000 * statistics.median(each[name] for each in kept) for name in kept[0]}
    return {"ms": 1000 * statistics.median(times[WARM_UPS:]), "parts": parts}


def answers(kv: RagKV, trace: RequestTrace) -> dict[str, float]:
    """Return seconds of whole answers, by ragkv's default and by transformers."""
    prompt, tokens = trace.prompts[1], ANSWER_TOKENS
    ids = torch.tensor([trace.ids[0]], device=kv.loaded.device)
    how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}

    def ours() -> object:
        return kv.generate(prompt, max_new_tokens=tokens, ignore_eos=True, sink=trace.sink)

    def theirs() -> object:
        with kv.turn(), torch.inference_mode():
            return kv.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **how)

    both = {"ragkv": ours, "transformers": theirs}
    return {
        name: statistics.median([seconds(call) for _ in range(4)][1:])
        for name, call in both.items()
    }


def main(given: list[str]) -> dict[str, Any]:
    """Measure, print a line for each length, and write the whole as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", default="4096,8192,16384,31744")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    device = torch.device(options.device)
    model = random_model(options.shape, device)
    tokenizer = AutoTokenizer.from_pretrained(default_model_folder())
    reuse = ReuseConfig(on_miss="skip", history=False)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": options.shape,
        "rows": [],
    }
    lengths = [int(each) for each in options.tokens.split(",")]
    with RagKV(model, tokenizer, store=":memory:", reuse=reuse) as kv:
        for trace in make_traces(kv, lengths, options.chunk_tokens, options.prompts):
            kv.precompute(trace.chunks, sink=trace.sink)
            row: dict[str, Any] = {"tokens": trace.tokens}
            row["plain_ms"] = plain_ms(kv, trace, cudnn=True)
            row["plain_without_cudnn_ms"] = plain_ms(kv, trace, cudnn=False)
            row["ragkv"] = {str(ratio): first_tokens(kv, trace, ratio) for ratio in RATIOS}
            row["answer_s"] = answers(kv, trace)
            found["rows"].append(row)
            print(json.dumps(row), flush=True)
            if options.json:  # what was measured before an end is kept
                options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
