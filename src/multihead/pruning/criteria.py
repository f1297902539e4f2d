"""How much each head matters, by several criteria, from a calibration text: moments in one pass,
gradients in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..io import Progress
from ..models.resize import head_layout
from ..models.site import Site
from ..models.transformers import evaluation
from .calibration import Batch
from .compensation import Fill, Moments, fills_of, without

__all__ = ["CRITERIA", "WITHIN_LAYER", "Scores", "base_of", "score"]

CRITERIA = {
    "gradient": (
        "mean over tokens of |O_h . dL/dO_h|: what the loss changes by, to first order, if the head"
        " gives 0 (Michel et al. 2019, per token)"
    ),
    "departure": "mean over tokens of |(O_h - mean O_h) . dL/dO_h|: the same if it gives its mean",
    "fisher": (
        "mean over tokens of ((O_h - mean O_h) . dL/dO_h)^2: to second order (Kwon et al. 2022, per"
        " token)"
    ),
    "fluctuation": (
        "variance of W_O's input times the squared norm of its rows (FLAP, An et al. 2024)"
    ),
    "share": "mean over tokens of the head's share of the layer's update",
    "norm": "mean over tokens of the norm of the head's update",
    "weights": "Frobenius norm of W_V W_O of the head: no text",
    "random": "random numbers, by a seed",
    "ablation": "loss without the head minus loss with it: one pass a head",
}
GRADIENTS = {"gradient", "departure", "fisher"}
WITHIN_LAYER = {
    "/layer": "divided by its layer's norm (Michel et al. 2019)",
    "/zscore": "less its layer's mean, over its layer's standard deviation (An et al. 2024)",
}  # behind a criterion


@dataclass
class Scores:
    """The scores `[H]` by criterion and site, and the moments of what enters W_O, for what stands
    in for removed heads.
    """

    values: dict[str, dict[str, Tensor]]
    moments: dict[str, Moments]
    loss: float  # mean, on the calibration text

    def of(self, name: str, gone: Mapping[str, Sequence[int]] | None = None) -> dict[str, Tensor]:
        """By this criterion; heads that are `gone` don't count in what their layer's others are
        compared with.
        """
        return {
            site: _within(value, name, (gone or {}).get(site, ()))
            for site, value in self.values[base_of(name)].items()
        }


def _within(value: Tensor, name: str, gone: Sequence[int]) -> Tensor:
    left = value[[h for h in range(len(value)) if h not in gone]]
    if name.endswith("/layer"):
        return value / left.norm().clamp(min=1e-30)
    if name.endswith("/zscore"):
        return (value - left.mean()) / left.std(correction=0).clamp(min=1e-30)
    return value


def base_of(name: str) -> str:
    """A criterion without what stands behind it, checked."""
    base, slash, within = name.partition("/")
    if base not in CRITERIA or slash + within not in ("", *WITHIN_LAYER):
        raise MultiheadError(
            f"criterion={name!r}: expected one of {', '.join(CRITERIA)}, or one of these followed"
            f" by {' or '.join(WITHIN_LAYER)}"
        )
    return base


def score(
    model: nn.Module,
    sites: Sequence[Site],
    batches: Sequence[Batch],
    criteria: Sequence[str],
    *,
    removed: Mapping[str, Sequence[int]] | None = None,
    fills: Mapping[str, Fill] | None = None,
    compensate: str = "refit",
    seed: int = 0,
    progress: Progress | None = None,
) -> Scores:
    """Scores of all heads on a calibration text, with the heads `removed` gone and `fills` in their
    place.

    Two passes over the text (one where no criterion needs gradients), and one a head for
    `ablation`.
    """
    names = {base_of(name) for name in criteria}
    gone, fills = dict(removed or {}), fills or {}
    passes = (
        1
        + bool(names & GRADIENTS)
        + (sum(s.num_heads for s in sites) if "ablation" in names else 0)
    )
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, passes * len(batches), "scoring heads")

    with evaluation(model):
        with without(sites, gone, fills):
            values, moments, loss = _measure(model, sites, batches, step)
        if names & GRADIENTS:
            values |= _gradients(model, sites, batches, gone, fills, moments, step)
        if "ablation" in names:
            values["ablation"] = _ablation(
                model, sites, batches, gone, moments, compensate, loss, step
            )
    values["fluctuation"] = {
        site.name: (moments[site.name].variance(site) * _row_norms(site)).sum(-1) for site in sites
    }
    if "weights" in names:
        values["weights"] = {site.name: _weights(site) for site in sites}
    random = torch.Generator().manual_seed(seed)
    values["random"] = {
        site.name: torch.rand(site.num_heads, generator=random, dtype=torch.float64)
        for site in sites
    }
    return Scores(values, moments, loss)


def _by_head(site: Site) -> Tensor:
    """W_O `[H, Ev, D]`, float64."""
    return site.out_weight()[0].detach().double().unflatten(0, (site.num_heads, site.head_dim))


def _row_norms(site: Site) -> Tensor:
    return _by_head(site).pow(2).sum(-1).cpu()


def _weights(site: Site) -> Tensor:
    out, found = _by_head(site), site.slices().v.weight().detach().double()
    values = found[list(head_layout(site).reads)]
    grams = values @ values.mT, out @ out.mT
    return (grams[0] * grams[1]).sum((-1, -2)).clamp(min=0).sqrt().cpu()


@torch.no_grad()
def _measure(
    model: nn.Module, sites: Sequence[Site], batches: Sequence[Batch], step: Callable[[], None]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Moments], float]:
    """Moments, norms, shares and the loss, in one pass: of what all heads give, also those that
    something stands in for.
    """
    sums = {site.name: _Sums(site) for site in sites}
    total, count = 0.0, 0
    for batch in batches:
        with ExitStack() as stack:
            for site in sites:  # ahead of what stands in for removed heads
                stack.callback(
                    site.out.register_forward_pre_hook(
                        _add(sums[site.name], batch, site), prepend=True
                    ).remove
                )
            loss, tokens = batch.loss(model)
        total, count = total + float(loss), count + tokens
        step()
    values = {
        "norm": {name: s.norm / s.rows for name, s in sums.items()},
        "share": {name: s.share / max(1, s.shares) for name, s in sums.items()},
    }
    return values, {name: s.moments() for name, s in sums.items()}, total / count


class _Sums:
    """Sums over rows of what enters a site's W_O."""

    def __init__(self, site: Site) -> None:
        self.heads, self.width = site.num_heads, site.head_dim
        size = self.heads * self.width
        self.weight = site.out_weight()[0].detach()  # [H*Ev, D]
        by_head = self.weight.unflatten(0, (self.heads, self.width)).float()
        self.gram = by_head @ by_head.mT
        self.rows = self.shares = 0
        self.total = torch.zeros(size, dtype=torch.float64)
        self.squares = torch.zeros(size, size, dtype=torch.float64)
        self.norm = torch.zeros(self.heads, dtype=torch.float64)
        self.share = torch.zeros(self.heads, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Rows `[n, H*Ev]`."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        self.rows += x.shape[0]
        self.total += x.double().sum(0).cpu()
        self.squares += (x.T @ x).double().cpu()
        by_head = x.unflatten(-1, (self.heads, self.width))
        self.norm += (
            torch.einsum("nhe,hef,nhf->nh", by_head, self.gram.to(x), by_head)
            .clamp(min=0)
            .sqrt()
            .double()
            .sum(0)
            .cpu()
        )
        whole = x @ self.weight.to(x)
        size = whole.pow(2).sum(-1)
        share = (by_head * (whole @ self.weight.to(x).T).view_as(by_head)).sum(-1)[size > 0] / size[
            size > 0, None
        ]
        self.share += share.double().sum(0).cpu()
        self.shares += len(share)

    def moments(self) -> Moments:
        mean = self.total / self.rows
        return Moments(self.rows, mean, self.squares / self.rows - mean[:, None] * mean)


def _add(sums: _Sums, batch: Batch, site: Site) -> Any:
    return lambda module, args: sums.add(batch.real(site, args[0]))


def _gradients(
    model: nn.Module,
    sites: Sequence[Site],
    batches: Sequence[Batch],
    gone: Mapping[str, Sequence[int]],
    fills: Mapping[str, Fill],
    moments: Mapping[str, Moments],
    step: Callable[[], None],
) -> dict[str, dict[str, Tensor]]:
    found = {
        name: {site.name: torch.zeros(site.num_heads, dtype=torch.float64) for site in sites}
        for name in GRADIENTS
    }
    rows = dict.fromkeys((site.name for site in sites), 0)
    for batch in batches:
        with ExitStack() as stack, torch.enable_grad():
            entered = stack.enter_context(_entering(sites))
            stack.enter_context(without(sites, gone, fills))
            loss, _ = batch.loss(model)
            grads = torch.autograd.grad(loss, [x for _, x in entered], allow_unused=True)
        for (site, x), grad in zip(entered, grads, strict=True):
            if grad is None:  # the loss doesn't hang on it
                continue
            given, back = batch.real(site, x.detach()), batch.real(site, grad)
            shape = (-1, site.num_heads, site.head_dim)
            mean = moments[site.name].mean.to(given.device, given.dtype)
            whole, part = (
                (y * back).reshape(shape).double().sum(-1).cpu() for y in (given, given - mean)
            )
            for name, value in (
                ("gradient", whole.abs()),
                ("departure", part.abs()),
                ("fisher", part**2),
            ):
                found[name][site.name] += value.sum(0)
            rows[site.name] += given.shape[0]
        step()
    return {
        name: {site: value / max(1, rows[site]) for site, value in by_site.items()}
        for name, by_site in found.items()
    }


@contextmanager
def _entering(sites: Sequence[Site]) -> Iterator[list[tuple[Site, Tensor]]]:
    """What enters each W_O, as a leaf or a part of a graph, whether or not the parameters are
    frozen.
    """
    entered: list[tuple[Site, Tensor]] = []

    def hook(site: Site) -> Any:
        def enter(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
            entered.append((site, x))
            return (x, *args[1:])

        return enter

    with ExitStack() as stack:
        for site in sites:
            stack.callback(site.out.register_forward_pre_hook(hook(site)).remove)
        yield entered


@torch.no_grad()
def _ablation(
    model: nn.Module,
    sites: Sequence[Site],
    batches: Sequence[Batch],
    gone: Mapping[str, Sequence[int]],
    moments: Mapping[str, Moments],
    compensate: str,
    loss: float,
    step: Callable[[], None],
) -> dict[str, Tensor]:
    found = {site.name: torch.zeros(site.num_heads, dtype=torch.float64) for site in sites}
    for site in sites:
        for head in range(site.num_heads):
            now = {**gone, site.name: sorted({*gone.get(site.name, ()), head})}
            total, count = 0.0, 0
            with without(sites, now, fills_of(sites, now, moments, compensate)):
                for batch in batches:
                    value, tokens = batch.loss(model)
                    total, count = total + float(value), count + tokens
                    step()
            found[site.name][head] = total / count - loss
    return found
