"""Compensation against least squares solved directly."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multihead
from families import FAMILIES, batches_of, model_of
from multihead.models.instrument import instrument
from multihead.models.site import find_sites
from multihead.pruning.compensation import Moments, fit_compensation

BY_NAME = {family.name: family for family in FAMILIES}


SITE = find_sites(model_of(BY_NAME["gpt2"]))[0]  # 4 heads of 12


def compensated(removed: list[int], moments: Moments, how: str, x: torch.Tensor) -> torch.Tensor:
    tap = fit_compensation([SITE], {SITE.name: removed}, {SITE.name: moments}, how)
    replaced = tap.heads_out(SITE, x)
    assert replaced is not None
    return replaced


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.sets(st.integers(0, 3), min_size=1, max_size=3))
def test_refit_is_least_squares(seed: int, gone: set[int]) -> None:
    """Among all linear guesses at the removed part, it leaves the least; the mean leaves more,
    nothing most.
    """
    x = torch.randn(400, 48, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = (
        x
        @ torch.randn(
            48, 48, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
        )
        + 0.5
    )
    moments = Moments(400, x.mean(0), torch.cov(x.T, correction=0))
    removed = sorted(gone)
    left = {
        how: float((compensated(removed, moments, how, x) - x).pow(2).sum())
        for how in ("refit", "mean", "none")
    }
    assert left["refit"] < left["mean"] < left["none"]
    stay = [h for h in range(4) if h not in gone]
    keep = torch.cat(
        [x.view(400, 4, 12)[:, stay].flatten(1), torch.ones(400, 1, dtype=torch.float64)], 1
    )
    wanted = x.view(400, 4, 12)[:, removed].flatten(1)
    least = float((keep @ torch.linalg.lstsq(keep, wanted).solution - wanted).pow(2).sum())
    assert least <= left["refit"] + 1e-9
    assert left["refit"] < least + 0.2 * (
        left["mean"] - least
    )  # a ridge keeps it from going all the way


def test_heads_that_others_foretell_cost_nothing() -> None:
    x = torch.randn(500, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 12:24] = 2 * x[:, :12] - 1  # the second head says what the first does
    moments = Moments(500, x.mean(0), torch.cov(x.T, correction=0))
    apart = (compensated([1], moments, "refit", x) - x).abs().max()
    assert float(apart) < 0.05 * float(x.abs().max())


def test_compensation_without_moments_is_zero() -> None:
    family = BY_NAME["gpt2"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    sites = find_sites(model)
    removed = {sites[1].name: [0, 2]}
    with torch.no_grad(), multihead.ablate_heads(model, ["L1.H0", "L1.H2"]):
        expected = model(**batch).logits
    for compensate in ("none", "mean", "refit"):
        tap = fit_compensation(sites, removed, {}, compensate)
        with torch.no_grad(), instrument(model, tap):
            torch.testing.assert_close(model(**batch).logits, expected)
    moments = {
        sites[1].name: Moments(9, torch.ones(48, dtype=torch.float64), torch.eye(48).double())
    }
    with torch.no_grad(), instrument(model, fit_compensation(sites, removed, moments, "mean")):
        assert not torch.allclose(model(**batch).logits, expected)
