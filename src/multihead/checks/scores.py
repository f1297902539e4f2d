"""How weights follow from q k': log A against the products of queries and keys, by regression."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Relative residual of a regression up to which the logarithms follow from the products.
FITS = 1e-3


@dataclass(frozen=True)
class ScoreFit:
    """`log A_hij = slope_h q_h . k_g + bias_hij + c_i`, as far as it holds.

    Attributes:
        slopes: the factor of each head, `[H]`.
        residual: the largest relative residual among heads; infinite where nothing can be fitted.
        has_bias: whether there is a bias by position that doesn't depend on the input.
        pairs: the head of q and that of k which each head fits, where they aren't its own.
        added: whether the products of a group's queries are added up.
        bias: the bias by position, `[H, L, S]`, where there is one: of the first key that a query
            reads 0, since a softmax leaves no other, and NaN of keys that it doesn't read.
    """

    slopes: Tensor
    residual: float
    has_bias: bool = False
    pairs: tuple[tuple[int, int], ...] = ()
    added: bool = False
    bias: Tensor | None = None

    @property
    def holds(self) -> bool:
        return self.residual <= FITS


def fit_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> ScoreFit:
    """Regression of weights `[N, H, L, S]` over several inputs, with q `[N, Hq, L, E]` and k `[N,
    G, S, E]`.

    First with each head's own q and k, without and with a bias by position; then, for each head,
    with every pair of a head of q and one of k; then with a group's queries added up.
    """
    valid, logs = _to_logs(weights)
    products = torch.einsum("nald,nbsd->nabls", queries, keys)
    num_q, num_k = products.shape[1:3]
    num_heads = weights.shape[1]
    best = ScoreFit(torch.zeros(num_heads), torch.inf)
    if num_heads == num_q and num_q % num_k == 0:
        heads = torch.arange(num_heads)
        own = products[:, heads, heads // (num_q // num_k)]
        for has_bias in (False, True):
            fits = [_fit(own[:, h], logs[:, h], valid[h], has_bias) for h in range(num_heads)]
            fit = ScoreFit(torch.tensor([s for s, _ in fits]), max(r for _, r in fits), has_bias)
            if fit.holds and has_bias:
                return replace(fit, bias=_find_bias(own, logs, valid, fit.slopes))
            if fit.holds:
                return fit
            best = min(best, fit, key=lambda f: f.residual)
        pairs, slopes, residuals = [], [], []
        for h in range(num_heads):
            tried = {
                (a, b): _fit(products[:, a, b], logs[:, h], valid[h], True)
                for a in range(num_q)
                for b in range(num_k)
            }
            pair = min(tried, key=lambda p: tried[p][1])
            pairs.append(pair)
            slopes.append(tried[pair][0])
            residuals.append(tried[pair][1])
        other = ScoreFit(torch.tensor(slopes), max(residuals), True, tuple(pairs))
        if other.holds:
            return other
    if num_k < num_q and num_q % num_k == 0 and num_heads % num_k == 0:
        groups = torch.arange(num_heads) // (num_heads // num_k)
        added = products.unflatten(1, (num_k, -1)).sum(2)[:, groups, groups]
        fits = [_fit(added[:, h], logs[:, h], valid[h], True) for h in range(num_heads)]
        factors = torch.tensor([s for s, _ in fits])
        summed = ScoreFit(factors, max(r for _, r in fits), added=True)
        return summed if summed.holds else best
    return best


def _fit(x: Tensor, y: Tensor, valid: Tensor, has_bias: bool) -> tuple[float, float]:
    """Slope and relative residual of `y [N, L, S]` against `x`, each row up to a constant."""
    if has_bias:
        x, y = x - x.mean(0), y - y.mean(0)
    x, y = (_center_rows(t, valid) for t in (x, y))
    if not x.norm() > 1e-9 or not y.norm() > 1e-9:
        return 0.0, torch.inf
    slope = float((x * y).sum() / x.square().sum())
    return slope, float((y - slope * x).norm() / y.norm())


def _center_rows(t: Tensor, valid: Tensor) -> Tensor:
    t = t * valid
    return (t - t.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp_min(1)) * valid


def _to_logs(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Where weights are large enough in every input, `[H, L, S]`; their logarithms."""
    return (weights > 1e-6).all(0), weights.clamp_min(1e-30).log()


def _find_bias(products: Tensor, logs: Tensor, valid: Tensor, slopes: Tensor) -> Tensor:
    """The rest of the logarithms after the products, `[H, L, S]`, up to a constant of each row."""
    bias = (logs - slopes[:, None, None].to(logs) * products).mean(0)
    first = valid.int().argmax(-1, keepdim=True)
    return (bias - bias.gather(-1, first)).where(valid, torch.nan)


@dataclass(frozen=True)
class CapFit:
    """`log A_hij = cap_h tanh(slope_h q k' / cap_h) + c_i`: caps and slopes `[H]`."""

    caps: Tensor
    slopes: Tensor
    residual: float

    @property
    def holds(self) -> bool:
        return self.residual <= FITS


def fit_cap(products: Tensor, weights: Tensor) -> CapFit:
    """A soft cap of the scores, by regression from q k' and weights `[N, H, L, S]`.

    With the argument q k' / b, log A is linear in tanh of it: b is searched for, from a tenth of
    the largest product to a thousand times that, and then refined.
    """
    valid, logs = _to_logs(weights)
    found = [_fit_cap(products[:, h], logs[:, h], valid[h]) for h in range(products.shape[1])]
    slopes, caps, residuals = (torch.tensor([f[n] for f in found]) for n in range(3))
    return CapFit(caps, slopes, float(residuals.max()))


def _fit_cap(x: Tensor, y: Tensor, valid: Tensor) -> tuple[float, float, float]:
    """Slope, cap and residual of one head."""
    largest = float(x.abs().max().clamp_min(1e-9))

    def try_width(width: float) -> tuple[float, float]:
        return _fit((x / width).tanh(), y, valid, has_bias=False)

    low, high = -1.0, 2.0  # powers of ten of the width, relative to the largest product
    for _ in range(12):
        step = (high - low) / 16
        powers = [low + n * step for n in range(17)]
        best = min(powers, key=lambda power: try_width(largest * 10**power)[1])
        low, high = best - step, best + step
    width = largest * 10**best
    cap, residual = try_width(width)
    return cap / width, cap, residual
