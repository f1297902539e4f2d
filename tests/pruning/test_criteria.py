"""Criteria against their definitions, written again in plain loops, and against a reading's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multihead
from families import FAMILIES, batches_of, model_of
from multihead.data.batch import Batch
from multihead.models.site import find_sites
from multihead.pruning.criteria import CRITERIA, Scores, score_heads
from multihead.pruning.surgery import remove_heads

BY_NAME = {family.name: family for family in FAMILIES}


def steps(name: str, padding: str) -> list[Batch]:
    """The family's texts, with the loss that a reading takes."""
    family = BY_NAME[name]
    model = model_of(family)
    return [Batch(batch).with_targets(model, causal=True) for batch in batches_of(family, padding)]


@pytest.mark.parametrize(
    ("name", "padding"), [("llama", "left"), ("gpt2", "none"), ("gemma2", "right")]
)
def test_criteria_are_what_a_reading_measures(name: str, padding: str) -> None:
    model = model_of(BY_NAME[name])
    sites = find_sites(model)
    found = score_heads(model, sites, steps(name, padding), ["taylor", "norm", "share"])
    table = multihead.read(model, batches_of(BY_NAME[name], padding), statistics=["importance"])
    for criterion, column in (("taylor", "importance"), ("norm", "norm"), ("share", "share")):
        mine = np.concatenate([found.values[criterion][site.name].numpy() for site in sites])
        np.testing.assert_allclose(mine, table.value(column), rtol=2e-4, atol=1e-6)


def test_taylor_mean_and_fisher_by_their_definitions() -> None:
    model = model_of(BY_NAME["llama"])
    site = find_sites(model)[0]
    batches = steps("llama", "none")
    found = score_heads(model, [site], batches, ["fisher"])
    xs, gs = [], []
    for batch in batches:
        held: list[torch.Tensor] = []

        def keep(module: Any, args: Any, held: list[torch.Tensor] = held) -> Any:
            held.append(args[0].detach().requires_grad_())
            return (held[0],)

        handle = site.out.register_forward_pre_hook(keep)
        loss, _ = batch.loss(model)
        gs.append(torch.autograd.grad(loss, held)[0].reshape(-1, 60))
        xs.append(held[0].detach().reshape(-1, 60))
        handle.remove()
    x, g = torch.cat(xs).double(), torch.cat(gs).double()
    terms = ((x - x.mean(0)) * g).view(-1, 6, 10).sum(-1)
    torch.testing.assert_close(
        found.values["fisher"][site.name], (terms**2).mean(0), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(
        found.values["taylor_mean"][site.name], terms.abs().mean(0), rtol=1e-4, atol=0
    )
    moments = found.moments[site.name]
    torch.testing.assert_close(moments.mean, x.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        moments.covariance, torch.cov(x.T, correction=0), rtol=1e-3, atol=1e-5
    )
    rows = site.out.weight.double().T.pow(2).sum(1)
    torch.testing.assert_close(
        found.values["flap"][site.name],
        (x.var(0, correction=0) * rows).view(6, 10).sum(-1),
        rtol=1e-3,
        atol=1e-6,
    )


def test_weights_and_layers_and_random() -> None:
    model = model_of(BY_NAME["llama"])
    sites = find_sites(model)
    found = score_heads(model, sites, steps("llama", "none"), ["weights", "random"], seed=4)
    for site in sites:
        v = site.module.v_proj.weight.double().view(3, 10, 48)
        o = site.out.weight.double().T.view(6, 10, 48)
        expected = torch.stack([(v[h // 2].T @ o[h]).norm() for h in range(6)])
        torch.testing.assert_close(found.values["weights"][site.name], expected, rtol=1e-5, atol=0)
        assert float(found.by_site("weights/layer")[site.name].norm()) == pytest.approx(1)
    smaller = remove_heads(
        model, {sites[0].name: [1, 2, 3]}, batches_of(BY_NAME["llama"], "none")[0]
    )  # heads 0, 4, 5
    left = score_heads(smaller, find_sites(smaller), steps("llama", "none"), ["weights"]).values[
        "weights"
    ][sites[0].name]
    torch.testing.assert_close(left, found.values["weights"][sites[0].name][[0, 4, 5]])
    again = score_heads(model, sites, steps("llama", "none"), ["random"], seed=4)
    other = score_heads(model, sites, steps("llama", "none"), ["random"], seed=5)
    assert torch.equal(again.values["random"][sites[0].name], found.values["random"][sites[0].name])
    assert not torch.equal(
        other.values["random"][sites[0].name], found.values["random"][sites[0].name]
    )


def test_ablation_is_the_loss_without_the_head() -> None:
    model = model_of(BY_NAME["gpt2"])
    sites = find_sites(model)
    batches = steps("gpt2", "none")
    found = score_heads(model, sites[:1], batches, ["ablation"], compensate="none")

    def loss() -> float:
        with torch.no_grad():
            pairs = [batch.loss(model) for batch in batches]
        return sum(float(a) for a, _ in pairs) / sum(b for _, b in pairs)

    base = loss()
    for head in range(4):
        with multihead.ablate_heads(model, [sites[0].head_label(head)]):
            assert float(found.values["ablation"][sites[0].name][head]) == pytest.approx(
                loss() - base, abs=1e-5
            )


@pytest.mark.parametrize(
    "name", ["luck", "fisher/head", "fisher/", "/zscore", "fisher/zscore/zscore"]
)
def test_unknown_criteria_are_refused(name: str) -> None:
    model = model_of(BY_NAME["gpt2"])
    with pytest.raises(
        ValueError,
        match=f"criterion='{name}': expected one of {', '.join(CRITERIA)}.*/layer or /zscore",
    ):
        score_heads(model, find_sites(model), steps("gpt2", "none"), [name])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1e6), min_size=4, max_size=4), min_size=1, max_size=3),
    st.sets(st.integers(0, 3), max_size=3),
)
def test_within_a_layer(values: list[list[float]], gone: set[int]) -> None:
    """Against NumPy; the order inside a layer stays, the heads that are gone don't count, one head
    or equal ones are no error.
    """
    given = {str(n): torch.tensor(layer, dtype=torch.float64) for n, layer in enumerate(values)}
    found = Scores({"norm": given}, {}, 0.0)
    left = [h for h in range(4) if h not in gone]
    for layer, value in given.items():
        some = value.numpy()[left]
        for within, middle, scale in (
            ("", 0.0, 1.0),
            ("/layer", 0.0, np.linalg.norm(some)),
            ("/zscore", some.mean(), some.std()),
        ):
            scored = found.by_site(f"norm{within}", {layer: sorted(gone)})[layer].numpy()
            assert np.isfinite(scored).all()
            if scale > 1e-6 * (1 + abs(some).max()):
                np.testing.assert_allclose(
                    scored, (value.numpy() - middle) / scale, rtol=1e-9, atol=1e-9
                )
                assert (np.diff(scored[left][np.argsort(some)]) >= -1e-9).all()
