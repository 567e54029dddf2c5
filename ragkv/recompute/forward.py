"""The subset forward pass: fresh K and V for the chosen rows, in the real prompt."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ragkv.model.load import LoadedModel
from ragkv.recompute.attention import Pass, Rows, subset_attention
from ragkv.select.observe import Observer, StopPass
from ragkv.splice.buffer import SplicedCache


@torch.no_grad()
def subset_forward(
    loaded: LoadedModel,
    ids: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
    cache: SplicedCache,
    observer: Observer | None = None,
) -> torch.Tensor | None:
    """Compute the rows at their true positions and overwrite them in the cache.

    Parameters
    ----------
    ids
        ``[tokens]`` the whole prompt.
    rows
        ``[rows]`` sorted positions to compute. With all of them this is a full prefill.
    observer
        Called in every layer before its attention; may raise :class:`StopPass`.

    Returns
    -------
    torch.Tensor or None
        Logits after the last row, ``[vocab]`` float32; None if the observer stopped
        the pass.
    """
    if loaded.architecture is None:
        raise ValueError("subset_forward() needs a supported model")
    where = torch.from_numpy(rows).to(loaded.device)
    chosen = torch.from_numpy(ids[rows].astype(np.int64)).to(loaded.device)
    cache.write_at(where)
    try:
        with subset_attention(loaded.model):
            out = loaded.model(
                input_ids=chosen[None],
                position_ids=where[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                ragkv_pass=Pass(Rows(where), loaded.architecture.windows, observer),
            )
    except StopPass:
        return None
    finally:
        cache.write_at(None)
    return torch.as_tensor(out.logits[0, -1].float())
