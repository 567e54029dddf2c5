"""How near a method's next-token distributions are to full attention's.

The full prefill's greedy answer is the yardstick: its first tokens are fed, whatever the
method would have said itself, on the method's repaired cache, and the distributions at
every position are compared (teacher forcing). Position 0 is the prompt's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ragkv.attend.forward import SubsetPass, subset_forward
from ragkv.errors import ConfigError
from ragkv.model.calls import cache_argument
from ragkv.model.loaded import require_reusable
from ragkv.prompt.history import TokenHistory
from ragkv.splice.buffer import SplicedCache

if TYPE_CHECKING:
    from ragkv import Prefilled, RagKV

FIDELITY_TOKENS = 16


@dataclass(frozen=True, eq=False, slots=True)
class Reference:
    """The first tokens of full attention's greedy answer, an end-of-text token included.

    ``logits``, ``[tokens, vocab]`` float32 on the CPU, are those that they were drawn from; of
    :func:`followed` those of a method in their place.
    """

    token_ids: tuple[int, ...]
    logits: torch.Tensor

    @property
    def log_probs(self) -> torch.Tensor:
        """The distributions, ``[tokens, vocab]`` float64."""
        return torch.log_softmax(self.logits.double(), dim=-1)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """A method against the reference.

    ``kl`` is the mean of ``KL(full || method)`` over the first positions, in nats; ``agreement``
    the share of them at which the method's most likely token is the reference's; ``is_same``
    whether it is at all positions, so that its greedy answer is the reference.
    """

    kl: float
    agreement: float
    is_same: bool = True


def _end_tokens(kv: RagKV) -> frozenset[int]:
    """Return the end-of-sequence tokens of the generation configuration and the tokenizer."""
    found = getattr(kv.loaded.model.generation_config, "eos_token_id", None)
    ids = found if isinstance(found, list) else [found, kv.tokenizer.eos_token_id]
    return frozenset(token for token in ids if token is not None)


@torch.inference_mode()
def reference(kv: RagKV, prefilled: Prefilled, *, tokens: int = FIDELITY_TOKENS) -> Reference:
    """Decode greedily from a full prefill, which is used up: its cache grows.

    Stops behind an end-of-text token, or after ``tokens`` tokens.

    Raises ConfigError: a logit is not a number.
    """
    ends = _end_tokens(kv)
    token_ids: list[int] = []
    rows = [prefilled.logits.float()]
    history = TokenHistory(np.asarray(prefilled.token_ids, dtype=np.int32))
    while True:
        token_ids.append(int(rows[-1].argmax()))
        if len(token_ids) == tokens or token_ids[-1] in ends:
            break
        rows += _fed(kv, prefilled, history, token_ids[-1:])
    found = torch.stack(rows)
    if found.isnan().any():
        raise ConfigError(
            f"full attention's logits are not numbers in {kv.loaded.dtype}: choose another dtype"
        )
    return Reference(tuple(token_ids), found.cpu())


def fidelity(
    kv: RagKV, prefilled: Prefilled, against: Reference, *, tokens: int = FIDELITY_TOKENS
) -> Fidelity:
    """Feed the reference's tokens on a method's cache, which is used up, and compare.

    ``tokens`` is how many of the first ones ``kl`` and ``agreement`` are over.
    """
    return compared(followed(kv, prefilled, against), against, tokens=tokens)


@torch.inference_mode()
def followed(kv: RagKV, prefilled: Prefilled, against: Reference) -> Reference:
    """Return a method's distributions where the reference's tokens are fed on its cache.

    In one pass, or one by one where decoding repairs between them. The cache is used up.
    """
    rows = [prefilled.logits.float()]
    history = TokenHistory(np.asarray(prefilled.token_ids, dtype=np.int32))
    tokens = against.token_ids[:-1]
    for fed in [tokens] if prefilled.copies is None else [[token] for token in tokens]:
        rows += _fed(kv, prefilled, history, fed)
    return Reference(against.token_ids, torch.stack(rows).cpu())


def compared(found: Reference, against: Reference, *, tokens: int = FIDELITY_TOKENS) -> Fidelity:
    """Compare distributions over the same tokens; ``kl`` is NaN where logits were."""
    own, full = found.log_probs, against.log_probs
    terms = torch.nn.functional.kl_div(own, full, reduction="none", log_target=True)
    kl = terms.masked_fill(full.isneginf(), 0.0).sum(-1)[:tokens].mean()
    same = own.argmax(-1) == torch.tensor(against.token_ids)
    agreement = same[:tokens].double().mean()
    return Fidelity(float(kl.clamp_min(0.0)), float(agreement), is_same=bool(same.all()))


def _fed(
    kv: RagKV, prefilled: Prefilled, history: TokenHistory, tokens: Sequence[int]
) -> list[torch.Tensor]:
    """Run tokens behind those of ``history``, and the repair of copies; return ``[vocab]`` each."""
    if not tokens:
        return []
    device, cache = prefilled.logits.device, prefilled.cache
    history.append(tokens)
    fed = np.arange(len(history) - len(tokens), len(history))
    if isinstance(cache, SplicedCache):
        copies = prefilled.copies
        rows = fed if copies is None else np.concatenate([copies.take(history), fed])
        subset = SubsetPass(history.ids, rows, cache, keep=len(fed))
        with kv.turn(), kv.loaded.without_autocast():
            return list(subset_forward(require_reusable(kv.loaded), subset))
    ids = torch.tensor([list(tokens)], device=device)
    positions = torch.from_numpy(fed).to(device)[None]
    given = cache_argument(kv.loaded.model, cache)
    out = kv.loaded.model(input_ids=ids, position_ids=positions, use_cache=True, **given)
    return list(out.logits[0].float())
