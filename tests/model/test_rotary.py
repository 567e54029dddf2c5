"""Rotation, its inverse, and re-positioning (DESIGN.md, what always holds, 3)."""

import pytest
import torch
from tiny import FAMILIES, tiny_model
from transformers.cache_utils import DynamicCache

from ragkv.model.architecture import backbone_of, describe
from ragkv.model.calls import cache_argument
from ragkv.model.rotary import RotaryTables, Table, add_rotated, rotate, unrotate


def cached_keys(model: torch.nn.Module, ids: torch.Tensor, first: int) -> torch.Tensor:
    cache = DynamicCache()
    positions = torch.arange(first, first + ids.shape[1])[None]
    with torch.no_grad():
        model(ids, position_ids=positions, **cache_argument(model, cache), use_cache=True)
    return torch.stack([layer.keys[0] for layer in cache.layers])


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_zero_keys_move_to_any_position(family):
    """Layer 0's keys depend on token and position alone: the model itself is the reference."""
    model = tiny_model(family)
    rotary = RotaryTables(backbone_of(model))
    kind = describe(model).rope_kinds[0]
    ids = torch.randint(0, 600, (1, 20), generator=torch.Generator().manual_seed(1))
    here, there = cached_keys(model, ids, 5)[0], cached_keys(model, ids, 300)[0]
    plain = unrotate(here, rotary.at(kind, torch.arange(5, 25)))
    moved = rotate(plain, rotary.at(kind, torch.arange(300, 320)))
    torch.testing.assert_close(moved, there, atol=2e-5, rtol=2e-5)
    assert (here - there).abs().max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_placing_equals_rotating_by_the_difference(family):
    model = tiny_model(family)
    rotary = RotaryTables(backbone_of(model))
    for kind in set(describe(model).rope_kinds):
        old, new = torch.arange(8, 40), torch.arange(108, 140)
        size = rotary.at(kind, old)[0].shape[-1] * 2
        keys = torch.randn(2, 32, size + 3, generator=torch.Generator().manual_seed(2))
        cached = rotate(keys, rotary.at(kind, old))
        placed = rotate(keys, rotary.at(kind, new))
        cos, sin, _ = rotary.at(kind, new - old)
        scale = (cos.square() + sin.square()).sqrt()
        shifted = rotate(cached, Table(cos / scale, sin / scale))
        torch.testing.assert_close(placed, shifted, atol=2e-5, rtol=2e-5)


ADJACENT = pytest.mark.parametrize("adjacent", [False, True], ids=["halves", "adjacent"])


@ADJACENT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unrotate_undoes_rotate(dtype, adjacent):
    angle = torch.rand(12, 4) * 6
    table = Table(angle.cos() * 1.3, angle.sin() * 1.3, adjacent)
    keys = torch.randn(3, 12, 11).to(dtype)
    back = unrotate(rotate(keys, table), table)
    bound = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    assert back.dtype == dtype
    assert (back.float() - keys.float()).abs().max() < bound
    assert torch.equal(back[..., 8:], keys[..., 8:])


@ADJACENT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [8, 6], ids=["whole", "partial"])
def test_what_is_added_rotated_is_what_rotate_gives(dtype, channels, adjacent):
    """In place, also where the target is a part of something larger."""
    torch.manual_seed(0)
    moves, whole = torch.randn(2, 5, 8), torch.randn(2, 9, 8).to(dtype)
    angles = torch.randn(5, channels // 2)
    table = Table(angles.cos(), angles.sin(), adjacent)
    expected = whole.clone()
    expected[:, 2:7] += rotate(moves, table)
    add_rotated(whole[:, 2:7], moves, table)
    torch.testing.assert_close(whole, expected, atol=1e-6, rtol=0)
