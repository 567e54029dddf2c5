"""ragkv in 100 lines, for Llama and its kin: encode, rotate, splice, recompute, decode."""

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin


def rotate(model, keys, positions, sign=1):
    """Turn keys [..., tokens, head_dim] by their positions, or back with sign=-1."""
    cos, sin = model.model.rotary_emb(keys, positions[None])
    first, second = keys.chunk(2, dim=-1)
    return keys * cos + torch.cat([-second, first], dim=-1) * sin * sign


def encode(model, tokenizer, text, sink=()):
    """1. Compute a chunk's keys and values behind the sink, the head that all prompts share.

    Keys are turned back to no position. A store keeps them for whatever prompt has the chunk.
    """
    read = tokenizer(text, add_special_tokens=not sink, return_offsets_mapping=True)
    ids, cache = torch.tensor([*sink, *read.input_ids]), DynamicCache()
    model(ids[None], None, None, cache)
    keys = rotate(model, torch.cat([x.keys for x in cache.layers]), torch.arange(len(ids)), -1)
    values = torch.cat([layer.values for layer in cache.layers])
    return text, read, keys[:, :, len(sink) :], values[:, :, len(sink) :]


def splice(model, prompt, read, entries):
    """2. Place known tokens where the prompt has them, their keys turned to the new position.

    A token is known where characters and id agree: at a chunk's edges they often do not.
    """
    known = {(*span, read.input_ids[slot]): slot for slot, span in enumerate(read.offset_mapping)}
    layers, heads, _, width = entries[0][2].shape
    keys, values = torch.zeros(2, layers, heads, len(known), width)
    places = []
    for text, own, own_keys, own_values in entries:
        start = prompt.index(text)
        spans = zip(own.offset_mapping, own.input_ids, strict=True)
        found = [known.get((start + begin, start + end, token)) for (begin, end), token in spans]
        rows = [row for row, slot in enumerate(found) if slot is not None]
        slots = torch.tensor([found[row] for row in rows], dtype=torch.long)
        keys[:, :, slots] = rotate(model, own_keys[:, :, rows], slots)
        values[:, :, slots] = own_values[:, :, rows]
        places.append(slots)
    return keys, values, places


def choose(tokens, places, ratio):
    """3. Take what nobody knows, and the first tokens of all chunks but the first, as EPIC does.

    ragkv's own method takes those that the question attends to.
    """
    _, _, *others = places  # the sink, and the chunk behind it: exact already
    each = int(ratio * sum(map(len, places[1:]))) // max(1, len(others))
    unknown = torch.ones(tokens).index_fill(0, torch.cat(places), 0).nonzero()[:, 0]
    return torch.cat([unknown, *(slots[:each] for slots in others)]).unique()


class Rows(CacheLayerMixin):
    """A layer's keys and values of the whole prompt: fresh ones replace those at their slots."""

    def __init__(self, keys, values, slots):
        self.keys, self.values, self.slots, self.is_initialized = keys, values, slots, True

    def update(self, keys, values, *args, **kwargs):
        self.keys[:, :, self.slots], self.values[:, :, self.slots] = keys, values
        return self.keys, self.values

    get_seq_length = get_mask_sizes = get_max_length = lazy_initialization = None  # not asked for


def recompute(model, ids, slots, keys, values):
    """4. Compute the chosen tokens alone, where they stand; each sees all up to itself."""
    cache = Cache(layers=[Rows(k[None], v[None], slots) for k, v in zip(keys, values, strict=True)])
    seen = torch.arange(len(ids)) <= slots[:, None]
    return model(ids[None, slots], seen[None, None], slots[None], cache).logits[0, -1]


@torch.no_grad()
def answer(model, tokenizer, head, chunks, question, ratio=0.2, most=32):
    """5. Decode as ever, from the repaired keys and values."""
    sink = encode(model, tokenizer, head)
    entries = [sink, *(encode(model, tokenizer, chunk, sink[1].input_ids) for chunk in chunks)]
    prompt = head + "\n\n".join(chunks) + question
    read = tokenizer(prompt, return_offsets_mapping=True)
    keys, values, places = splice(model, prompt, read, entries)
    slots = choose(len(read.input_ids), places, ratio)
    logits = recompute(model, torch.tensor(read.input_ids), slots, keys, values)
    cache, ids = DynamicCache(), []
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        cache.update(k[None], v[None], layer)
    while len(ids) < most and int(logits.argmax()) != model.config.eos_token_id:
        ids.append(int(logits.argmax()))
        logits = model(torch.tensor([ids[-1:]]), None, None, cache).logits[0, -1]
    return tokenizer.decode(ids)
