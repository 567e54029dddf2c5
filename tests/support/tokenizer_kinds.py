"""Small tokenizers of the kinds that write text in different ways: no download."""

import json
import pydoc_data.topics
from functools import cache

from tiny import SIZE, VOCAB, random_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

_TEXTS = [pydoc_data.topics.topics["if"], pydoc_data.topics.topics["for"]]
_NAMES = ["<unk>", "<s>", "</s>"]
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
KINDS = ("byte-level", "metaspace", "wordpiece")


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return Qwen's and Llama 3's kind; Llama 2's and Mistral's, which adds a BOS; or BERT's."""
    if kind == "byte-level":
        return tiny_tokenizer()
    raw = _metaspace() if kind == "metaspace" else _wordpiece()
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _metaspace() -> Tokenizer:
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    written = [f"<0x{byte:02X}>" for byte in range(256)]
    raw.train_from_iterator(
        _TEXTS,
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=_NAMES + written, show_progress=False),
    )
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    form = json.loads(raw.to_str())
    form["added_tokens"] = [each for each in form["added_tokens"] if each["content"] in _NAMES]
    return Tokenizer.from_str(json.dumps(form))  # bytes are ordinary tokens


def _wordpiece() -> Tokenizer:
    raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.train_from_iterator(
        [*_TEXTS, "日本語"],
        trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=_NAMES, show_progress=False),
    )
    raw.decoder = decoders.WordPiece(cleanup=False)
    return raw


def model_of(kind: str) -> PreTrainedModel:
    """Return a random model for the tokenizer."""
    tokenizer = tokenizer_of(kind)
    shape = {
        **SIZE,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "num_hidden_layers": 2,
    }
    return random_model(LlamaConfig(**shape))
