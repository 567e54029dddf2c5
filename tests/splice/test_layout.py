"""Aligning cached chunks with the prompt's tokens."""

import numpy as np
import pytest
import torch
from tiny import some_chunks, tiny_tokenizer
from tokenizers import Tokenizer, processors

from ragkv.chunk.kv import ChunkKV
from ragkv.prompt.render import Rendered, chat_head, render, render_sink, template_head
from ragkv.prompt.tokens import encode_behind, sink_tokens, tokenize
from ragkv.splice.layout import Layout, Origin, exact_prefix, lay_out


def entry(text: str, sink: str = "") -> ChunkKV:
    head = Rendered(sink, False)
    ids = sink_tokens(head, tiny_tokenizer()).ids
    tokens = encode_behind(head, ids, text, tiny_tokenizer())
    rows = torch.zeros(1, 1, len(tokens), 2)
    return ChunkKV(text, tokens.ids, tokens.offsets, rows, rows)


def laid(prompt: str, *chunks: str, sink: str = "") -> Layout:
    tokens = tokenize(Rendered(prompt, add_special_tokens=False), tiny_tokenizer())
    sink_ids = sink_tokens(Rendered(sink, False), tiny_tokenizer()).ids
    found = []
    for chunk in chunks:
        start = prompt.index(chunk)
        found.append((entry(chunk), start, start + len(chunk)))
    return lay_out(tokens, sink_ids, found)


def test_matched_rows_have_the_prompts_ids():
    first, second = some_chunks(2)
    layout = laid(f"Head\n\n{first}\n\n{second}\n\nTail?", first, second)
    assert len(layout.placed) == 2
    for piece in layout.placed:
        assert len(piece.rows) >= len(piece.entry) - 1
        assert np.array_equal(layout.ids[piece.slots], piece.entry.token_ids[piece.rows])
        assert np.all(np.diff(piece.slots) > 0)
        assert np.all(np.diff(piece.rows) > 0)


def test_tokens_that_merge_with_their_neighbours_are_fresh():
    chunk = some_chunks(1)[0]
    layout = laid(f"xx{chunk}yy tail", chunk)
    piece = layout.placed[0]
    covered = layout.offsets[piece.slots]
    assert covered[:, 0].min() >= 2
    assert covered[:, 1].max() <= 2 + len(chunk)
    assert len(piece.slots) > len(piece.entry) - 6


def test_the_bytes_of_an_emoji_are_matched_one_by_one():
    chunk = "emoji 😀😀👨‍👩‍👧 你好 and more words after them"
    layout = laid(f"Start.\n{chunk}\nEnd.", chunk)
    piece = layout.placed[0]
    assert len(piece.rows) == len(piece.entry)
    assert np.array_equal(layout.ids[piece.slots], piece.entry.token_ids)


def test_a_cut_chunk_is_used_up_to_its_cut():
    chunk = some_chunks(1)[0]
    prompt = f"{chunk[:100]} ... and something else entirely"
    tokens = tokenize(Rendered(prompt, add_special_tokens=False), tiny_tokenizer())
    whole = entry(chunk)
    layout = lay_out(tokens, tokens.ids[:0], [(whole, 0, 100)])
    piece = layout.placed[0]
    assert 20 < len(piece.rows) < len(whole)
    assert np.array_equal(piece.rows, np.arange(len(piece.rows)))
    assert layout.offsets[piece.slots, 1].max() <= 100


def test_the_last_token_is_always_fresh():
    chunk = some_chunks(1)[0]
    layout = laid(chunk, chunk)
    assert layout.origin[-1] == Origin.FRESH
    assert (layout.origin[:-1] == Origin.CACHED).all()


def test_sink_is_the_common_head():
    chunk = some_chunks(1)[0]
    layout = laid(f"The shared head\n{chunk}\nq", chunk, sink="The shared head\n")
    assert layout.sink == len(tokenize(Rendered("The shared head\n", False), tiny_tokenizer()))
    other = laid(f"The shared tail\n{chunk}\nq", chunk, sink="The shared head\n")
    assert 0 < other.sink < layout.sink


def test_exact_prefix_keeps_only_the_first_chunk_right_behind_the_sink():
    first, second = some_chunks(2)
    sink = "The shared head\n"
    layout = laid(f"{sink}{first}\n\n{second}\n\nq", first, second, sink=sink)
    kept = exact_prefix(layout)
    assert [piece.entry.text for piece in kept.placed] == [first]
    assert kept.origin[kept.placed[0].slots[-1] + 1] == Origin.FRESH
    gap = laid(f"{sink}Other words.\n\n{first}\n\nq", first, sink=sink)
    assert exact_prefix(gap).placed == ()
    other = laid(f"{sink}{first}\n\n{second}\n\nq", first, second, sink=f"{sink}And more.\n")
    assert other.sink == other.exact
    assert exact_prefix(other).placed == ()


def test_heads_of_templates():
    tokenizer = tiny_tokenizer()
    assert chat_head(tokenizer) == "<|bos|><|im_start|>user\n"
    assert template_head("Context:\n{context_str}\nQuery: {q}", tokenizer) == "Context:\n"
    head = template_head(
        [
            {"role": "system", "content": "Be brief {{really}}."},
            {"role": "user", "content": "Use this:\n{context}\n{input}"},
        ],
        tokenizer,
    )
    assert head == (
        "<|bos|><|im_start|>system\nBe brief {really}.<|im_end|>\n<|im_start|>user\nUse this:\n"
    )


def test_sinks_get_the_special_tokens_that_prompts_get():
    plain = tiny_tokenizer()
    raw = Tokenizer.from_str(plain.backend_tokenizer.to_str())
    raw.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    adds_bos = type(plain)(tokenizer_object=raw, bos_token="<|bos|>", eos_token="<|eos|>")
    for template in (None, plain.chat_template):
        adds_bos.chat_template = template
        for text in ("", "Context information is below.\n", "<|bos|>Context:\n"):
            sink = sink_tokens(render_sink(text, adds_bos), adds_bos).ids.tolist()
            prompt = tokenize(render(text + "Then more", adds_bos), adds_bos).ids.tolist()
            assert prompt[: len(sink)] == sink
            assert sink.count(0) == (1 if text else 0)
    head = chat_head(adds_bos)
    messages = [{"role": "user", "content": "Then more"}]
    sink = sink_tokens(render_sink(head, adds_bos), adds_bos).ids.tolist()
    prompt = tokenize(render(messages, adds_bos), adds_bos).ids.tolist()
    assert prompt[: len(sink)] == sink
    assert sink.count(0) == 1


@pytest.mark.parametrize("end", ["\n", "\n\n", "\n---\n", " ", ":"])
def test_a_sink_is_tokenised_as_it_reads_in_the_prompt(end):
    tokenizer = tiny_tokenizer()
    sink = Rendered("Use the passages" + end, add_special_tokens=False)
    ids = sink_tokens(sink, tokenizer).ids
    prompt = tokenize(Rendered(sink.text + "Some words", False), tokenizer).ids
    assert np.array_equal(prompt[: len(ids)], ids)
