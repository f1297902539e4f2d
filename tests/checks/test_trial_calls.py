"""The calls that the definition has to reproduce."""

from __future__ import annotations

import torch

from checks.samples import Separate, facts_of
from multihead.checks.trial_calls import trial_calls


@torch.no_grad()
def test_calls_with_their_masks() -> None:
    calls = list(trial_calls(facts_of(Separate())))
    assert [call.description.split(" as ")[0] for call in calls] == [
        "with its inputs alone",
        "with a causal mask",
        "with a mask",
    ]
    assert calls[0].allowed.all() and torch.equal(calls[1].allowed, torch.ones(5, 5).tril().bool())
    assert calls[2].allowed.diagonal().all() and not calls[2].allowed.all()
    assert all(call.out.shape == (3, 5, 24) for call in calls)


@torch.no_grad()
def test_other_lengths_and_fewer_key_heads() -> None:
    calls = {
        call.description: call
        for call in trial_calls(facts_of(torch.nn.functional.scaled_dot_product_attention))
    }
    assert "with is_causal=True" in calls
    assert calls["from 4 tokens to 7"].out.shape[1] == 4
    layer = torch.nn.MultiheadAttention(16, 2)
    padded = [c for c in trial_calls(facts_of(layer)) if c.description.startswith("with padding")]
    assert len(padded) == 1 and padded[0].allowed.shape == (3, 5, 5)
    assert not padded[0].allowed[:, :, 3:].any()
