"""Fit the weights of one site with fewer key/value heads (grouped-query attention) to a calibration
text.

The key/value heads are grouped, and each group gets one key and one value head, linear in those of
its members. Where a change of basis allows it (see `basis.py`), each member's queries and its rows
of W_O are changed along with them; last, W_O can be refitted by least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..models.resize import head_layout
from ..models.site import Site
from ..models.slices import HeadSlices, outputs_first
from ..ops.functional import compute
from .basis import (
    KeyBasis,
    align_heads,
    find_key_basis,
    fit_keys,
    fit_values,
    init_keys,
    key_moments,
    principal_components,
    value_moments,
)
from .grouping import CHOICES, Groups, group_heads
from .layerwise import LayerActivations

__all__ = [
    "METHODS",
    "SharedHeads",
    "SharingOptions",
    "fit_shared_heads",
    "require_shareable",
    "restored_weights",
    "write_shared_heads",
]

METHODS = ("svd", "aligned", "mean")
# numbers of one group's values, for each of its heads, up to which values and W_O are fitted
# together
MAX_JOINT_FIT = 4096
RIDGE = 1e-4  # in proportion, when W_O is refitted: without evidence in the text, it stays


def mean_weights(n: int) -> Tensor:
    """`[n]`: the mean of n heads (Ainslie et al. 2023, GQA)."""
    return torch.full((n,), 1 / n, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class SharingOptions:
    """How key/value heads become fewer; `method`, `choice` and `refit` as in `multihead.share`.

    `pool` gives the weights `[n]` with which the plain method "mean" adds up n heads of a group; a
    baseline may pass another function.
    """

    method: str = METHODS[0]
    choice: str = CHOICES[0]
    refit: bool = True
    pool: Callable[[int], Tensor] = mean_weights

    def __post_init__(self) -> None:
        for name, value, known in (
            ("method", self.method, METHODS),
            ("choice", self.choice, CHOICES),
        ):
            if value not in known:
                raise MultiheadError(f"{name}={value!r}: expected one of {', '.join(known)}")


@dataclass(frozen=True, eq=False)
class SharedHeads:
    """The weights of a site with N key/value heads, float64.

    Attributes:
        site: path of the attention module; `label` is its short label.
        groups: the original key/value heads that share each new one.
        order: the original query heads in their new order, in which those that share a key/value
            head are consecutive: new query head i reads key/value head i // (H / N).
        q, q_bias: `[H, E, D]` and `[H, E]`, in that order; a bias is None if the site has none.
        k, k_bias, v, v_bias: `[N, E, D]`, `[N, E]`, `[N, Ev, D]` and `[N, Ev]`.
        out, out_bias: W_O by heads `[H, Ev, D]`, in that order, and its bias `[D]`.
        error: squared error of the site's output on the calibration text, given the same inputs,
            relative to its squares.
        keys_error: the same with shared keys alone.
    """

    site: str
    label: str
    order: tuple[int, ...]
    groups: Groups
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    out_bias: Tensor | None
    error: float
    keys_error: float

    @property
    def reads(self) -> tuple[int, ...]:
        """For each query head of `order`, the new key/value head that it reads."""
        size = len(self.order) // len(self.groups)
        return tuple(i // size for i in range(len(self.order)))


def require_shareable(site: Site, num_kv_heads: int) -> None:
    """Raise `MultiheadError` unless the site can have `num_kv_heads` key/value heads."""
    slices = site.slices()
    if slices.layout == "latent":
        raise MultiheadError(
            f"{site.name} ({type(site.module).__name__}) can't share key/value heads: its keys and"
            " values are made of a latent vector that all heads share already, which is all that"
            " its cache holds; prune its heads, or leave this layer out"
        )
    if not head_layout(site).is_even:
        raise MultiheadError(
            f"{site.name}: its query heads share its key/value heads unevenly, as pruning with"
            " kind='any' leaves them; share first and prune then, prune with kind='even' or"
            " 'uniform', or leave this layer out"
        )
    n, has = num_kv_heads, slices.num_kv_heads
    if isinstance(n, bool) or not isinstance(n, int) or n < 1 or has % n:
        divisors = ", ".join(str(i) for i in range(1, has + 1) if has % i == 0)
        raise MultiheadError(
            f"num_kv_heads={n!r}: {site.name} has {has} key/value heads, which can't form {n!r}"
            f" groups of one size; expected one of {divisors}"
        )


# ---- fitting one site


@dataclass(frozen=True)
class _Group:
    """Key/value heads `members` that share, the query heads that read them, the member that each of
    these reads, and weights `[n]` of a plain sum.
    """

    members: tuple[int, ...]
    heads: list[int]
    member_of: list[int]
    pooled: Tensor

    def plain_maps(self, width: int) -> Tensor:
        """The plain sum as maps `[n, width, width]`."""
        return self.pooled[:, None, None] * torch.eye(width, dtype=torch.float64, device="cpu")


@torch.no_grad()
def fit_shared_heads(
    site: Site, num_kv_heads: int, capture: Callable[[], LayerActivations], options: SharingOptions
) -> SharedHeads:
    """Fit one site with fewer key/value heads; its weights are afterwards as they were.

    Args:
        site: the site, with all its key/value heads.
        num_kv_heads: must divide the number that it has.
        capture: runs the model on the calibration text, with the site's current weights.
        options: the method.

    Raises:
        MultiheadError: see `require_shareable`.
    """
    require_shareable(site, num_kv_heads)
    slices = site.slices()
    width, size = site.head_dim, site.num_heads // slices.num_kv_heads
    before = capture()
    basis = _key_basis(before)
    groups = group_heads(before.calls, basis, num_kv_heads, options.choice)
    parts = [
        _Group(
            group,
            [m * size + i for m in group for i in range(size)],
            [i // size for i in range(size * len(group))],
            options.pool(len(group)),
        )
        for group in groups
    ]
    order = [h for part in parts for h in part.heads]
    w_out = site.out_weight()[0].double().view(site.num_heads, width, -1)
    target = [x @ w_out.flatten(0, 1).to(x) for x in before.entered]
    is_fitted = options.method in ("svd", "aligned")

    q_maps = torch.eye(slices.q.index.shape[1], dtype=torch.float64, device="cpu").repeat(
        site.num_heads, 1, 1
    )
    k_maps = []
    for part in parts:
        if is_fitted and not basis.is_fixed:
            keys, q_maps[part.heads] = _fit_keys(
                before, basis, part, w_out[part.heads], options.method
            )
        else:
            keys = part.plain_maps(q_maps.shape[-1])
        k_maps.append(keys)
    q = q_maps.mT @ slices.q.weight().double()
    q_bias = _map_bias(slices.q.bias(), q_maps)
    k, k_bias = _merge(slices.k, groups, k_maps)
    with restored_weights([site]):
        member = _new_index(groups)
        slices.q.put(q, q_bias)
        slices.k.put(k[member], None if k_bias is None else k_bias[member])
        with_keys = capture()
        out, v_maps = w_out.clone(), []
        fits_values = is_fitted and _enters_unchanged(before)
        for part in parts:
            if fits_values:
                own = w_out[part.heads]
                part_target = [
                    x.view(len(x), -1, width)[:, part.heads].flatten(1) @ own.flatten(0, 1).to(x)
                    for x in before.entered
                ]
                values, out[part.heads] = _fit_values(with_keys, part, own, part_target, options)
            else:
                values = part.plain_maps(width)
            v_maps.append(values)
        v, v_bias = _merge(slices.v, groups, v_maps)
        slices.v.put(v[member], None if v_bias is None else v_bias[member])
        after = capture()
        bias = getattr(slices.out.module, "bias", None)
        flat, out_bias, error = _fit_out(
            after.entered, target, out.flatten(0, 1), bias, options.refit
        )
    return SharedHeads(
        site.name,
        site.label,
        tuple(order),
        groups,
        q[order],
        k,
        v,
        flat.view_as(out)[order],
        None if q_bias is None else q_bias[order],
        k_bias,
        v_bias,
        out_bias,
        error,
        _relative_error(with_keys.entered, target, w_out.flatten(0, 1)),
    )


@torch.no_grad()
def write_shared_heads(site: Site, shared: SharedHeads) -> None:
    """Write shared heads into a site that still has all its key/value heads, each shared head
    repeated for all its members.
    """
    slices = site.slices()
    position = torch.tensor(shared.order, device="cpu").argsort()
    slices.q.put(shared.q[position], None if shared.q_bias is None else shared.q_bias[position])
    member = _new_index(shared.groups)
    slices.k.put(shared.k[member], None if shared.k_bias is None else shared.k_bias[member])
    slices.v.put(shared.v[member], None if shared.v_bias is None else shared.v_bias[member])
    out = slices.out.module
    outputs_first(out).copy_(shared.out[position].flatten(0, 1).T)
    if shared.out_bias is not None:
        out.bias.copy_(shared.out_bias)  # type: ignore[operator]


def _enters_unchanged(activations: LayerActivations) -> bool:
    """Whether the head outputs enter W_O as they are, without a gate or norm in between."""
    outputs = compute(activations.calls[0]).transpose(1, 2).flatten(0, 1).flatten(1)
    return torch.allclose(outputs, activations.entered[0], rtol=1e-3, atol=1e-4)


def _key_basis(activations: LayerActivations) -> KeyBasis:
    if activations.raw_k is None or activations.raw_q is None:
        return KeyBasis.none_allowed()
    call = activations.calls[0]
    return find_key_basis(activations.raw_k, call.k, activations.raw_q, call.q)


def _fit_keys(
    activations: LayerActivations, basis: KeyBasis, part: _Group, out: Tensor, method: str
) -> tuple[Tensor, Tensor]:
    """Maps of the members' keys `[n, E, E]`, whose sum is the shared key, and of the queries
    `[heads, E, E]`.
    """
    n, key_maps, query_maps = len(part.members), [], []
    for moment, query in key_moments(activations.calls, basis, part.members, part.heads, out):
        if method == "aligned":
            turns = align_heads(moment.sum(0), n)  # [blocks, n, e, e]
            key_maps.append((turns / n).transpose(0, 1))
            query_maps.append(torch.linalg.inv(turns)[:, part.member_of].transpose(0, 1).mH)
        else:
            b, t = fit_keys(
                moment, query, part.member_of, init_keys(moment, query, part.member_of, n)
            )
            key_maps.append(b.unflatten(-2, (n, -1)).transpose(0, 1))
            query_maps.append(t.mH)
    width = activations.calls[0].k.shape[-1]
    return basis.to_matrix(key_maps, width), basis.to_matrix(query_maps, width)


def _fit_values(
    activations: LayerActivations,
    part: _Group,
    out: Tensor,
    target: Sequence[Tensor],
    options: SharingOptions,
) -> tuple[Tensor, Tensor]:
    """Maps of the members' values `[n, Ev, Ev]`, whose sum is the shared value, and W_O by heads
    `[heads, Ev, D]`.
    """
    n, width = len(part.members), out.shape[1]
    separately = (
        options.method == "aligned"
        or not options.refit
        or n * width * len(part.heads) > MAX_JOINT_FIT
    )
    total, cross = value_moments(
        activations.calls, part.members, part.heads, None if separately else target
    )
    common = (  # [n*Ev, n*Ev]
        total
        if separately
        else torch.stack([total[h, :, h] for h in range(len(part.heads))]).sum(0)
    )
    if options.method == "aligned":
        turns = align_heads(common, n)
        return turns / n, torch.linalg.inv(turns)[part.member_of] @ out
    metric = torch.zeros(n, width, width, dtype=torch.float64, device="cpu")
    metric.index_add_(0, torch.tensor(part.member_of, device="cpu"), out @ out.mT)
    b = torch.linalg.qr(principal_components(common, metric, width))[0]
    if separately or cross is None:
        inner = b.mT @ common @ b
        ridge = 1e-9 * inner.diagonal().mean().clamp(min=1e-30) * torch.eye(width, device="cpu")
        back = torch.linalg.solve(inner + ridge, b.mT @ common)
        back = back.unflatten(1, (n, width)).transpose(0, 1)
        return b.view(n, width, width), back[part.member_of] @ out
    b, new = fit_values(total, cross, b)
    return b.view(n, width, width), new


def _fit_out(
    entered: Sequence[Tensor],
    target: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    refit: bool,
) -> tuple[Tensor, Tensor | None, float]:
    """W_O `[H*Ev, D]` and its bias, by least squares if `refit`; and the remaining error."""
    if not refit:
        bias = None if bias is None else bias.double()
        return weight, bias, _relative_error(entered, target, weight)
    count = sum(len(x) for x in entered)
    x_mean, y_mean = (
        sum(x.double().sum(0) for x in rows) / count if bias is not None else 0.0
        for rows in (entered, target)
    )
    total = cross = torch.zeros((), device="cpu")
    for x, y in zip(entered, target, strict=True):
        centred = x.double() - x_mean
        total = total + centred.T @ centred
        cross = cross + centred.T @ (y.double() - y_mean)
    ridge = RIDGE * total.diagonal().mean().clamp(min=1e-30)
    weight = torch.linalg.solve(
        total + ridge * torch.eye(len(total), device="cpu"), cross + ridge * weight
    )
    if bias is None:
        return weight, None, _relative_error(entered, target, weight)
    shift = y_mean - x_mean @ weight  # type: ignore[operator]
    return weight, bias.double() + shift, _relative_error(entered, target, weight, shift)


def _relative_error(
    entered: Sequence[Tensor], target: Sequence[Tensor], weight: Tensor, shift: Tensor | float = 0.0
) -> float:
    rest = sum(
        float((x.double() @ weight + shift - y).square().sum())
        for x, y in zip(entered, target, strict=True)
    )
    return rest / max(sum(float(y.double().square().sum()) for y in target), 1e-300)


def _merge(
    rows: HeadSlices, groups: Groups, maps: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The sum over each group of its members' rows, each through its map: weights `[N, E, D]` and
    biases `[N, E]`.
    """
    weight, bias = rows.weight().double(), rows.bias()
    pairs = list(zip(groups, maps, strict=True))
    merged = torch.stack([(m.mT @ weight[list(group)]).sum(0) for group, m in pairs])
    if bias is None:
        return merged, None
    mapped = bias.double()[:, None]
    return merged, torch.stack([(mapped[list(group)] @ m)[:, 0].sum(0) for group, m in pairs])


def _map_bias(bias: Tensor | None, maps: Tensor) -> Tensor | None:
    return None if bias is None else (bias.double()[:, None] @ maps)[:, 0]


def _new_index(groups: Groups) -> Tensor:
    """For each original key/value head, the number of the new one."""
    index = torch.zeros(sum(map(len, groups)), dtype=torch.long, device="cpu")
    for number, group in enumerate(groups):
        index[list(group)] = number
    return index


@contextmanager
def restored_weights(sites: Sequence[Site]) -> Iterator[None]:
    """Restore the weights of the sites' projections at the end."""
    modules = [
        rows.module
        for slices in (site.slices() for site in sites)
        for rows in (slices.q, slices.k, slices.v, slices.out)
    ]
    saved = {id(p): (p, p.detach().clone()) for module in modules for p in module.parameters()}
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved.values():
                parameter.copy_(value)
