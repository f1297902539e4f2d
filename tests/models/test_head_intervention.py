"""Heads replaced or scaled where they enter W_O."""

from __future__ import annotations

import torch

from multihead.models import HeadIntervention, find_sites, instrument, suspend
from multihead.models.instrument import replaced_heads
from small import llama


def test_zero_mean_affine_and_gate() -> None:
    """Each kind of intervention against its definition, on a site of three heads of width 8."""
    site = find_sites(llama())[0]
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(2))
    heads = x.unflatten(-1, (3, 8))
    constant, matrix = torch.randn(8), torch.randn(16, 8)
    gate = torch.tensor([0.5, 2.0, -1.0])
    name = site.name
    cases = {
        "zero": (HeadIntervention({name: [1]}), torch.zeros(8)),
        "mean": (HeadIntervention({name: [1]}, constant={name: constant}), constant),
        "affine": (
            HeadIntervention({name: [1]}, constant={name: constant}, matrix={name: matrix}),
            constant + torch.cat([heads[..., 0, :], heads[..., 2, :]], -1) @ matrix,
        ),
    }
    for kind, (tap, value) in cases.items():
        want = heads.clone()
        want[..., 1, :] = value
        torch.testing.assert_close(tap.heads_out(site, x), want.flatten(-2), msg=kind)
        assert list(tap.replaces(site)) == ([] if kind == "zero" else [1])
    gated = HeadIntervention(gate={name: gate}).heads_out(site, x)
    torch.testing.assert_close(gated, (heads * gate[:, None]).flatten(-2))
    both = HeadIntervention({name: [1]}, matrix={name: matrix}, gate={name: gate})
    want = heads * gate[:, None]
    want[..., 1, :] = torch.cat([want[..., 0, :], want[..., 2, :]], -1) @ matrix
    torch.testing.assert_close(both.heads_out(site, x), want.flatten(-2))
    other = find_sites(llama())[1]
    torch.testing.assert_close(cases["zero"][0].heads_out(other, x), x)


def test_replaced_heads_are_those_of_all_taps() -> None:
    model = llama()
    site, other = find_sites(model)
    with (
        instrument(model, HeadIntervention({site.name: [2]}, constant={site.name: torch.ones(8)})),
        instrument(model, HeadIntervention({site.name: [0]})),
        instrument(model, HeadIntervention({site.name: [1]}, constant={site.name: torch.ones(8)})),
    ):
        assert replaced_heads(site) == [1, 2] and replaced_heads(other) == []
        with suspend(model):
            assert replaced_heads(site) == []
    assert replaced_heads(site) == []
