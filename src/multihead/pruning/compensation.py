"""What stands in for heads that are gone: nothing, their mean, or what those that stay foretell of
them.

The input x of W_O is known to be linear in what the heads give, so whatever is linear in the heads
that stay costs nothing: it goes into W_O's own rows and bias. With the mean m and the covariance C
of x over the calibration text, the best such guess at the removed part r from the kept part k is
m_r + (x_k - m_k) C_kk^-1 C_kr (least squares), and the mean alone where that is left out (as FLAP
compensates, An et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.site import Site
from ..models.slices import outputs_first

__all__ = ["COMPENSATIONS", "Fill", "Moments", "fill_of", "fills_of", "without"]

COMPENSATIONS = ("refit", "mean", "none")
# of the mean variance: what the text says of directions that it hardly has is not believed
RIDGE = 1e-2


@dataclass
class Moments:
    """Of the input of a site's W_O over the real rows of some text: how many, their mean `[H*Ev]`,
    their covariance.
    """

    rows: int
    mean: Tensor  # float64
    covariance: Tensor  # float64 [H*Ev, H*Ev]

    def variance(self, site: Site) -> Tensor:
        """`[H, Ev]`."""
        return self.covariance.diagonal().view(site.num_heads, site.head_dim)


@dataclass(frozen=True)
class Fill:
    """What the removed columns of W_O's input are taken for: `const + kept @ matrix`, float64."""

    const: Tensor  # [removed]
    matrix: Tensor | None  # [kept, removed]


def columns(site: Site, heads: Sequence[int]) -> Tensor:
    """Of W_O's input."""
    return (
        torch.arange(site.num_heads * site.head_dim).view(site.num_heads, -1)[list(heads)].flatten()
    )


def fill_of(site: Site, removed: Sequence[int], moments: Moments | None, compensate: str) -> Fill:
    gone, stay = (
        columns(site, removed),
        columns(site, [h for h in range(site.num_heads) if h not in removed]),
    )
    if compensate == "none" or moments is None:
        return Fill(torch.zeros(len(gone), dtype=torch.float64), None)
    mean, covariance = moments.mean, moments.covariance
    if compensate == "mean" or not len(stay):
        return Fill(mean[gone], None)
    known = covariance[stay][:, stay]
    ridge = RIDGE * known.diagonal().mean().clamp(min=1e-30)
    matrix = torch.linalg.solve(
        known + ridge * torch.eye(len(stay), dtype=known.dtype), covariance[stay][:, gone]
    )
    return Fill(mean[gone] - mean[stay] @ matrix, matrix)


def fills_of(
    sites: Iterable[Site],
    removed: Mapping[str, Sequence[int]],
    moments: Mapping[str, Moments],
    compensate: str,
) -> dict[str, Fill]:
    return {
        site.name: fill_of(site, removed[site.name], moments.get(site.name), compensate)
        for site in sites
        if removed.get(site.name)
    }


def filled(site: Site, removed: Sequence[int], fill: Fill, x: Tensor) -> Tensor:
    """W_O's input `[..., H*Ev]` with the removed heads' part replaced."""
    gone, stay = (
        columns(site, heads).to(x.device)
        for heads in (removed, [h for h in range(site.num_heads) if h not in removed])
    )
    guess = fill.const.to(x.device, x.dtype)
    if fill.matrix is not None:
        guess = guess + x[..., stay] @ fill.matrix.to(x.device, x.dtype)
    return x.index_copy(-1, gone, guess.expand(*x.shape[:-1], -1))


@contextmanager
def without(
    sites: Sequence[Site], removed: Mapping[str, Sequence[int]], fills: Mapping[str, Fill]
) -> Iterator[None]:
    """The model as it will be without these heads, for the length of a `with`, by hooks on W_O:
    nothing is cut.
    """
    with ExitStack() as stack:
        for site in sites:
            if removed.get(site.name):
                stack.callback(
                    site.out.register_forward_pre_hook(
                        _hook(site, removed[site.name], fills[site.name])
                    ).remove
                )
        yield


def _hook(site: Site, removed: Sequence[int], fill: Fill) -> Any:
    return lambda module, args: (filled(site, removed, fill, args[0]), *args[1:])


@torch.no_grad()
def put(out: nn.Module, site: Site, removed: Sequence[int], fill: Fill) -> None:
    """Writes the fill into the narrowed W_O `out` of what was `site`: its rows of the heads that
    stay, and its bias.
    """
    weight = outputs_first(site.out).double().cpu()  # [D, H*Ev]
    gone = weight[:, columns(site, removed)]
    if fill.matrix is not None:
        new = (
            weight[:, columns(site, [h for h in range(site.num_heads) if h not in removed])]
            + gone @ fill.matrix.T
        )
        outputs_first(out).copy_(new)
    bias: Tensor = out.bias  # type: ignore[assignment]
    bias += (gone @ fill.const).to(bias)
