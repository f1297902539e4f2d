"""One site with fewer key/value heads: equal heads stay equal, and each method is no worse than a
simpler one."""

from __future__ import annotations

import copy

import pytest
import torch

from families import FAMILIES, model_of
from multihead.models.site import find_sites
from multihead.pruning.shared_heads import METHODS, write_shared_heads
from multihead.pruning.shared_heads import _key_basis as key_basis_of
from pruning.sharing import share_weights
from pruning.small_models import BATCHES, TURNING, copies, held_at, make, one, outputs


def test_keys_behind_a_norm_allow_no_change_of_basis() -> None:
    model = make("qwen3")
    site = find_sites(model)[0]
    assert key_basis_of(held_at(model, site)).is_fixed
    found = one(site, model, method="svd")  # keys are pooled then, values are not
    assert found.error < one(site, model, method="mean", refit=False).error


@pytest.mark.parametrize("name", TURNING)
@pytest.mark.parametrize("turn", [False, True])
def test_copies_of_one_head_share_without_loss(name: str, turn: bool) -> None:
    """Equal heads under every method; turned and scaled ones under those that align, and not under
    pooling.
    """
    model = make(name)
    site = find_sites(model)[0]
    copies(site, [0, 1, 0, 1], turn)
    before = outputs(model)
    for method in METHODS:
        found = one(site, model, method=method, refit=False)
        assert found.groups == ((0, 2), (1, 3)) and found.order == (0, 2, 1, 3)
        if turn and method not in ("svd", "aligned"):
            assert found.error > 0.05
            continue
        assert found.error < 1e-6, method
        changed = copy.deepcopy(model)
        write_shared_heads(find_sites(changed)[0], found)
        torch.testing.assert_close(outputs(changed), before, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", TURNING)
def test_aligned_is_no_worse_than_pooled_and_principal_no_worse_than_aligned(name: str) -> None:
    model = make(name, seed=3)
    site = find_sites(model)[1]
    methods = ("mean", "aligned", "svd")
    error = {
        (m, refit): one(site, model, method=m, refit=refit).error
        for m in methods
        for refit in (False, True)
    }
    assert error["svd", False] < error["aligned", False] < error["mean", False]
    assert error["svd", True] < error["mean", True]
    assert all(error[m, True] < error[m, False] for m in methods)


def test_the_error_told_is_that_of_the_site() -> None:
    model = make("gpt2")
    site = find_sites(model)[0]
    found = one(site, model)

    def updates() -> torch.Tensor:
        kept: list[torch.Tensor] = []
        handle = site.out.register_forward_hook(lambda m, a, y: kept.append(y))
        outputs(model)
        handle.remove()
        return torch.cat(kept) - bias

    bias = site.out_weight()[1].clone()
    before = updates()
    write_shared_heads(site, found)
    rest = float((updates() - before).square().sum() / before.square().sum())
    assert rest == pytest.approx(found.error, rel=0.01)


def test_plain_sums_may_have_other_weights() -> None:
    """A baseline that keeps one head of each group is a sum with one weight of 1."""
    model = make("llama")
    site = find_sites(model)[0]
    first = one(
        site,
        model,
        method="mean",
        choice="neighbours",
        refit=False,
        pool=lambda n: torch.eye(n, dtype=torch.float64)[0],
    )
    torch.testing.assert_close(first.k, site.slices().k.weight().double()[[0, 2]])
    torch.testing.assert_close(first.v, site.slices().v.weight().double()[[0, 2]])


def test_latent_keys_are_refused() -> None:
    family = next(f for f in FAMILIES if f.name == "deepseek_v3")
    with pytest.raises(ValueError, match="latent vector that all heads share already"):
        share_weights(copy.deepcopy(model_of(family)), 1, BATCHES)
