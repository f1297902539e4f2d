"""Wrong steps of latent attention: each changes what its name says, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from checks.test_definition import LATENT, projected_latents
from multihead.checks.definition import expand_latents, rotate_pairs
from multihead.checks.latent_steps import (
    drop_rotary_key,
    expand_without,
    normalize_keys_alone,
    rotary_key_of_first_head,
    rotate_keys,
    rotate_other_end,
    rotate_whole_heads,
)

LATENTS = projected_latents().latents
assert LATENTS is not None
RIGHT = expand_latents(LATENTS, LATENT)


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        (expand_without("kv_norm"), "kv"),
        (expand_without("q_norm"), "q"),
        (expand_without("q_norm", "kv_norm"), "qkv"),
        (normalize_keys_alone, "v"),
        (rotary_key_of_first_head, "k"),
        (drop_rotary_key, "k"),
    ],
)
def test_what_is_expanded_wrongly(step: object, changed: str) -> None:
    wrong = step(LATENTS, LATENT)  # type: ignore[operator]
    parts = zip("qkv", wrong, RIGHT, strict=True)
    assert "".join(name for name, a, b in parts if not torch.equal(a, b)) == changed
    assert all(a.shape == b.shape for a, b in zip(wrong, RIGHT, strict=True))


@pytest.mark.parametrize("rotary_first", [False, True])
def test_the_rotary_key_of_heads(rotary_first: bool) -> None:
    d = replace(LATENT, rotary_first=rotary_first)
    right, first, none = (
        step(LATENTS, d)[1].unflatten(-1, (4, 6))
        for step in (expand_latents, rotary_key_of_first_head, drop_rotary_key)
    )
    part = slice(2) if rotary_first else slice(4, None)
    assert (right[..., part] == right[..., :1, part]).all() and right[..., part].any()
    assert torch.equal(first[..., 0, :], right[..., 0, :])
    assert not first[..., 1:, part].any() and not none[..., part].any()
    other = slice(2, None) if rotary_first else slice(4)
    assert torch.equal(first[..., other], right[..., other])


def test_what_is_rotated_wrongly() -> None:
    q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in RIGHT)
    right = rotate_pairs(k, LATENT)
    assert torch.equal(right[..., :4], k[..., :4]) and not torch.equal(right, k)
    turned = rotate_keys(q, k, v, LATENT)
    assert turned[0] is q and torch.equal(turned[1], right) and turned[2] is v
    whole = rotate_whole_heads(q, k, v, LATENT)[1]
    assert torch.equal(whole, rotate_pairs(k, replace(LATENT, rotary_dim=None)))
    other = rotate_other_end(q, k, v, LATENT)[1]
    assert torch.equal(other[..., 2:], k[..., 2:]) and not torch.equal(other[..., :2], k[..., :2])
