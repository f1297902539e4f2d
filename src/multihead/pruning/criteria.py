"""Scores of heads by several criteria on a calibration text: moments in one pass, gradients in a
second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.batch import Batch
from ..errors import MultiheadError
from ..io import Progress
from ..models.contexts import evaluation
from ..models.head_intervention import HeadIntervention
from ..models.head_updates import first_order_effects, norm_factors, update_norms, update_shares
from ..models.instrument import Tap, instrument
from ..models.resize import head_layout
from ..models.site import Site
from .compensation import Moments, fit_compensation

__all__ = ["CRITERIA", "NORMALIZATIONS", "Scores", "base_criterion", "mean_loss", "score_heads"]

CRITERIA = {
    "taylor": (
        "mean over tokens of |O_h . dL/dO_h|: the change of the loss, to first order, if the head"
        " gives 0 (Michel et al. 2019, per token)"
    ),
    "taylor_mean": (
        "mean over tokens of |(O_h - mean O_h) . dL/dO_h|: the same if the head gives its mean"
    ),
    "fisher": (
        "mean over tokens of ((O_h - mean O_h) . dL/dO_h)^2: to second order (Kwon et al. 2022, per"
        " token)"
    ),
    "flap": "variance of W_O's input times the squared norm of its rows (FLAP, An et al. 2024)",
    "share": "mean over tokens of the head's share of the layer's update",
    "norm": "mean over tokens of the norm of the head's update",
    "weights": "Frobenius norm of W_V W_O of the head, without a text",
    "random": "random numbers, by a seed",
    "ablation": "loss without the head minus loss with it: one pass a head",
}
GRADIENTS = ("taylor", "taylor_mean", "fisher")
# may follow the name of a criterion
NORMALIZATIONS = {
    "/layer": "divided by the norm over its layer (Michel et al. 2019)",
    "/zscore": "minus the mean of its layer, over its standard deviation (An et al. 2024)",
}
ByCriterion = dict[str, dict[str, Tensor]]  # scores [H] by criterion and site


@dataclass
class Scores:
    """Scores of heads.

    Attributes:
        values: float64 `[H]` by criterion, without normalisation, and site.
        moments: of what enters W_O, by site, for compensation.
        loss: mean loss a token on the calibration text.
    """

    values: ByCriterion
    moments: dict[str, Moments]
    loss: float

    def by_site(
        self, criterion: str, removed: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, Tensor]:
        """Scores `[H]` by site; removed heads don't count in the normalisation of their layer."""
        return {
            site: _normalize(value, criterion, (removed or {}).get(site, ()))
            for site, value in self.values[base_criterion(criterion)].items()
        }


def _normalize(value: Tensor, criterion: str, removed: Sequence[int]) -> Tensor:
    kept = value[[h for h in range(len(value)) if h not in removed]]
    if criterion.endswith("/layer"):
        return value / kept.norm().clamp(min=1e-30)
    if criterion.endswith("/zscore"):
        return (value - kept.mean()) / kept.std(correction=0).clamp(min=1e-30)
    return value


def base_criterion(name: str) -> str:
    """The criterion without its normalisation; raises `MultiheadError` for an unknown name."""
    base, slash, normalization = name.partition("/")
    if base not in CRITERIA or slash + normalization not in ("", *NORMALIZATIONS):
        raise MultiheadError(
            f"criterion={name!r}: expected one of {', '.join(CRITERIA)}, or one of these followed"
            f" by {' or '.join(NORMALIZATIONS)}"
        )
    return base


def score_heads(
    model: nn.Module,
    sites: Sequence[Site],
    batches: Sequence[Batch],
    criteria: Sequence[str],
    *,
    compensation: HeadIntervention | None = None,
    compensate: str = "refit",
    seed: int = 0,
    progress: Progress | None = None,
) -> Scores:
    """Score all heads on a calibration text.

    One pass over the text, a second one if some criterion needs gradients, and one a head for
    "ablation".

    Args:
        sites: the sites whose heads are scored.
        criteria: names, with or without normalisation.
        compensation: heads that are removed already, and what replaces them. They are scored by
            what they would give.
        compensate: of the head that "ablation" removes.
        seed: of "random".

    Raises:
        MultiheadError: an unknown criterion.
    """
    names = {base_criterion(name) for name in criteria}
    compensation = compensation or HeadIntervention()
    num_passes = 1 + any(name in names for name in GRADIENTS)
    num_passes += sum(site.num_heads for site in sites) if "ablation" in names else 0
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, num_passes * len(batches), "scoring heads")

    with evaluation(model):
        moments, values, loss = _score_outputs(model, sites, batches, compensation, step)
        if names & set(GRADIENTS):
            values |= _score_gradients(model, sites, batches, compensation, moments, step)
        if "ablation" in names:

            def without(site: Site, head: int) -> HeadIntervention:
                removed = dict(compensation.removed)
                removed[site.name] = sorted({*removed.get(site.name, ()), head})
                return fit_compensation(sites, removed, moments, compensate)

            values["ablation"] = {
                site.name: torch.tensor(
                    [
                        mean_loss(model, sites, batches, without(site, head), step) - loss
                        for head in range(site.num_heads)
                    ],
                    dtype=torch.float64,
                    device="cpu",
                )
                for site in sites
            }
    values["flap"] = {
        site.name: (moments[site.name].variance(site) * _row_norms(site)).sum(-1) for site in sites
    }
    if "weights" in names:
        values["weights"] = {site.name: _weight_norms(site) for site in sites}
    random = torch.Generator().manual_seed(seed)
    values["random"] = {
        site.name: torch.rand(site.num_heads, generator=random, dtype=torch.float64, device="cpu")
        for site in sites
    }
    return Scores(values, moments, loss)


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    sites: Sequence[Site],
    batches: Sequence[Batch],
    compensation: HeadIntervention,
    step: Callable[[], None] | None = None,
) -> float:
    """Mean loss a token with the compensated heads replaced."""
    total, count = 0.0, 0
    changed = [site for site in sites if site.name in compensation.removed]
    with evaluation(model), instrument(model, compensation, sites=changed):
        for batch in batches:
            loss, tokens = batch.loss(model)
            total, count = total + float(loss), count + tokens
            if step is not None:
                step()
    return total / count


# ---- from the weights


def _out_by_head(site: Site) -> Tensor:
    """W_O `[H, Ev, D]`, float64."""
    return site.out_weight()[0].detach().double().unflatten(0, (site.num_heads, site.head_dim))


def _row_norms(site: Site) -> Tensor:
    return _out_by_head(site).pow(2).sum(-1).cpu()


def _weight_norms(site: Site) -> Tensor:
    out, v = _out_by_head(site), site.slices().v.weight().detach().double()
    v = v[list(head_layout(site).reads)]
    return ((v @ v.mT) * (out @ out.mT)).sum((-1, -2)).clamp(min=0).sqrt().cpu()


# ---- from one pass


class _BatchTap(Tap):
    """A tap that knows which batch the model is run on."""

    batch: Batch


class _OutputSums(_BatchTap):
    """Sums over real tokens of what enters each W_O, of the norms of head updates, and of their
    shares.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sums = {site.name: _SiteSums(site) for site in sites}

    def heads_out(self, site: Site, x: Tensor) -> None:
        self.sums[site.name].add(self.batch.select(x, site))


class _SiteSums:
    def __init__(self, site: Site) -> None:
        size = site.num_heads * site.head_dim
        self.weight = site.out_weight()[0].detach()  # [H*Ev, D]
        self.num_heads = site.num_heads
        self.factors = norm_factors(_out_by_head(site))
        self.rows = self.rows_with_share = 0
        self.total = torch.zeros(size, dtype=torch.float64, device="cpu")
        self.squares = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        self.norm = torch.zeros(site.num_heads, dtype=torch.float64, device="cpu")
        self.share = torch.zeros(site.num_heads, dtype=torch.float64, device="cpu")

    def add(self, x: Tensor) -> None:
        """Add rows `[n, H*Ev]`."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        weight, factors = self.weight.to(x), self.factors.to(x)
        self.rows += x.shape[0]
        self.total += x.double().sum(0).cpu()
        self.squares += (x.T @ x).double().cpu()
        by_head = x.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)  # [H, n, Ev]
        self.norm += update_norms(by_head, factors).double().sum(-1).cpu()
        shares, exists = update_shares(by_head, x @ weight, weight)
        self.share += (shares * exists).double().sum(-1).cpu()
        self.rows_with_share += int(exists.sum())

    def moments(self) -> Moments:
        mean = self.total / self.rows
        return Moments(self.rows, mean, self.squares / self.rows - mean[:, None] * mean)


@torch.no_grad()
def _score_outputs(
    model: nn.Module,
    sites: Sequence[Site],
    batches: Sequence[Batch],
    compensation: HeadIntervention,
    step: Callable[[], None],
) -> tuple[dict[str, Moments], ByCriterion, float]:
    """Moments, the criteria "norm" and "share", and the mean loss, in one pass: of what all heads
    give, also the replaced ones.
    """
    tap = _OutputSums(sites)
    total, count = 0.0, 0
    with instrument(model, tap, compensation, sites=sites):
        for batch in batches:
            tap.batch = batch
            loss, tokens = batch.loss(model)
            total, count = total + float(loss), count + tokens
            step()
    values = {
        "norm": {name: s.norm / s.rows for name, s in tap.sums.items()},
        "share": {name: s.share / max(1, s.rows_with_share) for name, s in tap.sums.items()},
    }
    return {name: s.moments() for name, s in tap.sums.items()}, values, total / count


# ---- from a pass with gradients


class _EnteredTensors(Tap):
    """Collects what enters each W_O as tensors with gradients, whether or not the parameters are
    frozen.
    """

    def __init__(self) -> None:
        self.entered: list[tuple[Site, Tensor]] = []

    def heads_out(self, site: Site, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        self.entered.append((site, x))
        return x


def _score_gradients(
    model: nn.Module,
    sites: Sequence[Site],
    batches: Sequence[Batch],
    compensation: HeadIntervention,
    moments: Mapping[str, Moments],
    step: Callable[[], None],
) -> ByCriterion:
    sums = {
        name: {
            site.name: torch.zeros(site.num_heads, dtype=torch.float64, device="cpu")
            for site in sites
        }
        for name in GRADIENTS
    }
    rows = dict.fromkeys((site.name for site in sites), 0)
    for batch in batches:
        tap = _EnteredTensors()
        with torch.enable_grad(), instrument(model, tap, compensation, sites=sites):
            loss = batch.gradient_loss(model)
        grads = torch.autograd.grad(loss, [x for _, x in tap.entered], allow_unused=True)
        for (site, x), grad in zip(tap.entered, grads, strict=True):
            if grad is None:  # the loss doesn't depend on it
                continue
            entered, grad = batch.select(x.detach(), site), batch.select(grad, site)
            mean = moments[site.name].mean.to(entered.device, entered.dtype)
            whole, centred = (
                first_order_effects(y, grad, site.num_heads).cpu()
                for y in (entered, entered - mean)
            )
            for name, value in zip(
                GRADIENTS, (whole.abs(), centred.abs(), centred**2), strict=True
            ):
                sums[name][site.name] += value.sum(0)
            rows[site.name] += len(entered)
        step()
    return {
        name: {site: value / max(1, rows[site]) for site, value in by_site.items()}
        for name, by_site in sums.items()
    }
