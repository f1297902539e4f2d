"""Compensation for removed heads: nothing, their mean, or a least-squares prediction from the heads
that are kept.

The input x of W_O is linear in the head outputs, so whatever is linear in the kept heads costs
nothing: it is merged into W_O and its bias. With mean m and covariance C of x over the calibration
text, the best prediction of the removed part r from the kept part k is
m_r + (x_k - m_k) C_kk^-1 C_kr (least squares), or the mean m_r alone (as FLAP compensates, An et
al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..models.head_intervention import HeadIntervention
from ..models.site import Site
from ..models.slices import outputs_first

__all__ = ["COMPENSATIONS", "Moments", "fit_compensation", "merge_compensation"]

COMPENSATIONS = ("refit", "mean", "none")
RIDGE = 1e-2  # of the mean variance: directions with little variance are shrunk


@dataclass
class Moments:
    """Mean `[H*Ev]` and covariance `[H*Ev, H*Ev]` of what enters a site's W_O over the real tokens
    of a text, float64.
    """

    rows: int
    mean: Tensor
    covariance: Tensor

    def variance(self, site: Site) -> Tensor:
        """`[H, Ev]`."""
        return self.covariance.diagonal().view(site.num_heads, site.head_dim)


def fit_compensation(
    sites: Iterable[Site],
    removed: Mapping[str, Sequence[int]],
    moments: Mapping[str, Moments],
    compensate: str,
) -> HeadIntervention:
    """A tap that replaces the removed heads' outputs by their compensation.

    Args:
        sites: the model's sites.
        removed: head numbers by the name of their site.
        moments: by the name of a site; sites without are compensated with zeros.
        compensate: one of `COMPENSATIONS`.
    """
    constant, matrix = {}, {}
    for site in sites:
        if not removed.get(site.name) or compensate == "none" or site.name not in moments:
            continue
        mean, covariance = moments[site.name].mean, moments[site.name].covariance
        gone, kept = _columns(site, removed[site.name])
        if compensate == "mean" or not len(kept):
            constant[site.name] = mean[gone]
            continue
        known = covariance[kept][:, kept]
        ridge = RIDGE * known.diagonal().mean().clamp(min=1e-30)
        matrix[site.name] = torch.linalg.solve(
            known + ridge * torch.eye(len(kept), dtype=known.dtype, device="cpu"),
            covariance[kept][:, gone],
        )
        constant[site.name] = mean[gone] - mean[kept] @ matrix[site.name]
    return HeadIntervention(removed, constant=constant, matrix=matrix)


@torch.no_grad()
def merge_compensation(out: nn.Module, site: Site, compensation: HeadIntervention) -> None:
    """Merge the compensation at `site` into `out`, the W_O of its smaller copy, which has a
    bias.
    """
    weight = outputs_first(site.out).double().cpu()  # [D, H*Ev]
    gone, kept = _columns(site, compensation.removed[site.name])
    constant = compensation.constant.get(site.name)
    matrix = compensation.matrix.get(site.name)
    if matrix is not None:
        outputs_first(out).copy_(weight[:, kept] + weight[:, gone] @ matrix.T)
    if constant is not None:
        bias: Tensor = out.bias  # type: ignore[assignment]
        bias += (weight[:, gone] @ constant).to(bias)


def _columns(site: Site, removed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Columns of W_O's input that belong to the removed and to the kept heads."""
    columns = torch.arange(site.num_heads * site.head_dim, device="cpu").view(site.num_heads, -1)
    kept = [h for h in range(site.num_heads) if h not in removed]
    return columns[list(removed)].flatten(), columns[kept].flatten()
