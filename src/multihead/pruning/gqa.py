"""From many key/value heads to few: which share, in which order the query heads then stand, and the
weights of what is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..io import Progress
from ..models.resize import head_layout
from ..models.site import Site, find_sites
from ..models.slices import HeadSlices, SiteSlices, outputs_first
from ..ops.functional import compute
from .alignment import (
    Geometry,
    align,
    fit_keys,
    fit_values,
    geometry,
    key_moments,
    principal,
    start_keys,
    value_moments,
)
from .grouping import CHOICES, groups_of
from .layerwise import Held, batches_of, walking

__all__ = ["CHOICES", "METHODS", "Shared", "put", "share", "shared"]

METHODS = ("svd", "aligned", "mean", "first", "random")
TOKENS = 8192  # of the calibration text
# numbers of one group's values, for each of its heads, up to which values and W_O are fitted
# together
LARGEST = 4096
RIDGE = 1e-4  # in proportion, when W_O is fitted anew: it stays where the text says nothing


@dataclass(frozen=True, eq=False)
class Shared:
    """A site with fewer key/value heads, as weights (float64).

    `groups`: the original key/value heads that each new one stands for. `order`: the original query
    heads in the order in which
    they stand now, so that those that share are neighbours and the result is a plain grouped model:
        of H query heads, number i
    reads key/value head i // (H / N). `q` `[H, E, D]` and `out` `[H, Ev, D]` (W_O by heads) are in
    that order, `k` `[N, E, D]` and `v` `[N, Ev, D]` in that of the groups; biases are None where
    the site has none.

    `error` is that of the site's output on the calibration text, from the same inputs: the squared
    difference in proportion to the squares. `keys_error` is the same with keys shared and values
    not.
    """

    site: str
    label: str
    order: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
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
        """The key/value head, among the new ones, that each query head of `order` reads."""
        each = len(self.order) // len(self.groups)
        return tuple(i // each for i in range(len(self.order)))


def share(
    model: nn.Module,
    kv_heads: int,
    *,
    texts: str | Sequence[str] | Sequence[Mapping[str, Any]],
    tokenizer: Any = None,
    method: str = METHODS[0],
    choice: str = CHOICES[0],
    layers: Sequence[int | str] | None = None,
    refit: bool = True,
    seed: int = 0,
    tokens: int | None = TOKENS,
    progress: Progress | None = None,
) -> list[Shared]:
    """Weights of a model with `kv_heads` key/value heads a layer, calibrated layer by layer; the
    model itself stays as it is.

    Each layer is calibrated on what reaches it from those before it as they are by then. `put`
    writes a result into the model, each shared head as often as it was shared.

    Args:
        model: one whose projections are known (see `Site.slices`).
        kv_heads: how many each site has afterwards; must divide the number that it has.
        texts: the calibration text or texts, or ready-made batches of model inputs without padding.
        tokenizer: the model's own, for texts.
        method: "mean" pools W_K and W_V (Ainslie et al. 2023, GQA), "first" and "random" keep one
            head of each group. "aligned" first brings the heads near to one another by changes of
            basis that leave the layer as it is (turns and one scaling; queries and W_O undo them),
            then pools. "svd" takes the key and the value from which least squares give those of the
            group best, where they are read, and turns queries and W_O along.
        choice: which heads share: "similar" or "neighbours".
        layers: numbers of the layers to share in, or labels of sites; all by default.
        refit: fit W_O anew on the calibration text, by least squares, to what the site gave before;
            under "svd" W_V with it.
        seed: for "random".
        tokens: of the calibration text are read, at most.
        progress: called with sites done, sites in all, and the stage.

    Raises:
        ValueError: a number of heads that doesn't divide, an unknown method, choice or layer,
            projections that can't be taken apart, a text that is empty.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> found = share(model, 4, texts="it was the best of times, it was the worst of times", tokenizer=tokenizer, layers=[0])
    >>> found[0].label, found[0].k.shape[0], len(found[0].order)
    ('L0', 4, 8)
    """
    _named("method", method, METHODS)
    _named("choice", choice, CHOICES)
    sites = _chosen(find_sites(model), layers)
    for site in sites:
        _check(site, kv_heads)
    sites = [site for site in sites if site.slices().num_kv_heads > kv_heads]
    batches = batches_of(model, texts, tokenizer, tokens=tokens)
    found: list[Shared] = []
    with walking(model, batches, sites) as walk, _as_they_were(sites):
        for site in sites:
            found.append(
                shared(
                    site,
                    kv_heads,
                    calibration=lambda site=site: walk.hold(site),
                    method=method,  # type: ignore[misc]
                    choice=choice,
                    refit=refit,
                    seed=seed + len(found),
                )
            )
            put(site, found[-1])
            if progress is not None:
                progress(len(found), len(sites), "sharing keys and values")
    return found


@torch.no_grad()
def shared(
    site: Site,
    n: int,
    *,
    calibration: Callable[[], Held],
    method: str = METHODS[0],
    choice: str = CHOICES[0],
    refit: bool = True,
    seed: int = 0,
) -> Shared:
    """One site with `n` key/value heads. `calibration()` gives what reaches the site with the
    weights that it has by then; the site is afterwards as it was.
    """
    _check(site, n)
    rows = site.slices()
    heads, kv, width = site.num_heads, rows.num_kv_heads, site.head_dim
    each = heads // kv
    held = calibration()
    shape = _geometry(held)
    groups = groups_of(held.calls, shape, n, choice)
    order = [m * each + i for group in groups for m in group for i in range(each)]
    w_out = site.out_weight()[0].double().view(heads, width, -1)
    bare = torch.allclose(
        compute(held.calls[0]).transpose(1, 2).flatten(0, 1).flatten(1),
        held.entered[0],
        rtol=1e-3,
        atol=1e-4,
    )
    goal = [x @ w_out.flatten(0, 1).to(x) for x in held.entered]
    draw = torch.Generator().manual_seed(seed)
    picks = [
        int(torch.randint(len(g), (), generator=draw)) if method == "random" else 0 for g in groups
    ]
    parts = [
        _Group(
            group,
            [m * each + i for m in group for i in range(each)],
            [i // each for i in range(each * len(group))],
            _pooled(method, len(group), pick),
        )
        for group, pick in zip(groups, picks, strict=True)
    ]

    q_maps = torch.eye(rows.q.index.shape[1], dtype=torch.float64).repeat(heads, 1, 1)
    k_maps = []
    for part in parts:
        keys = part.pooled[:, None, None] * torch.eye(q_maps.shape[-1], dtype=torch.float64)
        if method in ("aligned", "svd") and not shape.fixed:
            keys, q_maps[part.heads] = _keys(held, shape, part, w_out[part.heads], method)
        k_maps.append(keys)
    q, q_bias = q_maps.mT @ rows.q.weight().double(), _turned(rows.q.bias(), q_maps)
    k, k_bias = _merged(rows.k, groups, k_maps)
    with _as_they_were([site]):
        back = _back(groups)
        rows.q.put(q, q_bias)
        rows.k.put(k[back], None if k_bias is None else k_bias[back])
        now = calibration()
        out, v_maps = w_out.clone(), []
        for part in parts:
            values = part.pooled[:, None, None] * torch.eye(width, dtype=torch.float64)
            if method in ("aligned", "svd") and bare:
                mine = [
                    x.view(len(x), heads, width)[:, part.heads].flatten(1)
                    @ w_out[part.heads].flatten(0, 1).to(x)
                    for x in held.entered
                ]
                values, out[part.heads] = _values(now, part, w_out[part.heads], mine, method, refit)
            v_maps.append(values)
        v, v_bias = _merged(rows.v, groups, v_maps)
        rows.v.put(v[back], None if v_bias is None else v_bias[back])
        last = calibration()
        out_bias = getattr(site.slices().out.module, "bias", None)
        flat, out_bias, error = _out(last.entered, goal, out.flatten(0, 1), out_bias, refit)
    keys_error = _error(now.entered, goal, w_out.flatten(0, 1))
    return Shared(
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
        keys_error,
    )


@torch.no_grad()
def put(site: Site, found: Shared) -> None:
    """Writes what is shared into a site that still has all its key/value heads, each as often as it
    is shared.
    """
    rows = site.slices()
    out = rows.out.module
    back = torch.tensor(found.order).argsort()
    rows.q.put(found.q[back], None if found.q_bias is None else found.q_bias[back])
    member = _back(found.groups)
    rows.k.put(found.k[member], None if found.k_bias is None else found.k_bias[member])
    rows.v.put(found.v[member], None if found.v_bias is None else found.v_bias[member])
    weight = outputs_first(out)
    weight.copy_(found.out[back].flatten(0, 1).T)
    if found.out_bias is not None:
        out.bias.copy_(found.out_bias)  # type: ignore[operator]


@dataclass(frozen=True)
class _Group:
    """Key/value heads that share, the query heads that read them, whose member each of those reads,
    and what pooling takes.
    """

    members: tuple[int, ...]
    heads: list[int]
    member_of: list[int]
    pooled: Tensor  # [n]


def _pooled(method: str, n: int, pick: int) -> Tensor:
    if method in ("first", "random"):
        return torch.eye(n, dtype=torch.float64)[pick]
    return torch.full((n,), 1 / n, dtype=torch.float64)


def _keys(
    held: Held, shape: Geometry, part: _Group, out: Tensor, method: str
) -> tuple[Tensor, Tensor]:
    """Maps of the members' keys `[n, E, E]`, whose sum is the shared key, and of the queries
    `[heads, E, E]`.
    """
    n, tops, backs = len(part.members), [], []
    for moment, query in key_moments(held.calls, shape, part.members, part.heads, out):
        if method == "aligned":
            turns = align(moment.sum(0), n)  # [blocks, n, e, e]
            tops.append((turns / n).transpose(0, 1))
            backs.append(torch.linalg.inv(turns)[:, part.member_of].transpose(0, 1).mH)
        else:
            b, t = fit_keys(
                moment, query, part.member_of, start_keys(moment, query, part.member_of, n)
            )
            tops.append(b.unflatten(-2, (n, -1)).transpose(0, 1))
            backs.append(t.mH)
    width = held.calls[0].k.shape[-1]
    return shape.matrix(tops, width), shape.matrix(backs, width)


def _values(
    now: Held, part: _Group, out: Tensor, goal: Sequence[Tensor], method: str, refit: bool
) -> tuple[Tensor, Tensor]:
    """Maps of the members' values `[n, Ev, Ev]`, whose sum is the shared value, and W_O by heads
    `[heads, Ev, D]`.
    """
    n, width = len(part.members), out.shape[1]
    large = method == "aligned" or not refit or n * width * len(part.heads) > LARGEST
    total, cross = value_moments(
        now.calls, part.members, part.heads, None if large else goal
    )  # common: [n*Ev, n*Ev]
    common = (
        total if large else torch.stack([total[h, :, h] for h in range(len(part.heads))]).sum(0)
    )
    if method == "aligned":
        turns = align(common, n)
        return turns / n, torch.linalg.inv(turns)[part.member_of] @ out
    weight = torch.zeros(n, width, width, dtype=torch.float64)
    weight.index_add_(0, torch.tensor(part.member_of), out @ out.mT)
    b = torch.linalg.qr(principal(common, weight, width))[0]
    if large or cross is None:
        inner = b.mT @ common @ b
        ridge = 1e-9 * inner.diagonal().mean().clamp(min=1e-30) * torch.eye(width)
        back = (
            torch.linalg.solve(inner + ridge, b.mT @ common)
            .unflatten(1, (n, width))
            .transpose(0, 1)
        )
        return b.view(n, width, width), back[part.member_of] @ out
    b, new = fit_values(total, cross, b)
    return b.view(n, width, width), new


def _out(
    entered: Sequence[Tensor],
    goal: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    refit: bool,
) -> tuple[Tensor, Tensor | None, float]:
    """W_O `[H*Ev, D]` with its bias, by least squares if `refit`; and the error that is left."""
    if refit:
        count = sum(len(x) for x in entered)
        x_mean, y_mean = (
            sum(x.double().sum(0) for x in these) / count if bias is not None else 0.0
            for these in (entered, goal)
        )
        total = cross = torch.zeros(())
        for x, y in zip(entered, goal, strict=True):
            centred = x.double() - x_mean
            total = total + centred.T @ centred
            cross = cross + centred.T @ (y.double() - y_mean)
        ridge = RIDGE * total.diagonal().mean().clamp(min=1e-30)
        weight = torch.linalg.solve(total + ridge * torch.eye(len(total)), cross + ridge * weight)
        if bias is not None:
            shift = y_mean - x_mean @ weight  # type: ignore[operator]
            return weight, bias.double() + shift, _error(entered, goal, weight, shift)
    return weight, None if bias is None else bias.double(), _error(entered, goal, weight)


def _error(
    entered: Sequence[Tensor], goal: Sequence[Tensor], weight: Tensor, shift: Tensor | float = 0.0
) -> float:
    rest = sum(
        float((x.double() @ weight + shift - y).square().sum())
        for x, y in zip(entered, goal, strict=True)
    )
    return rest / max(sum(float(y.double().square().sum()) for y in goal), 1e-300)


def _merged(
    rows: HeadSlices, groups: Sequence[Sequence[int]], maps: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The sum over each group of its members' rows, each through its map: weights `[N, E, D]` and
    biases `[N, E]`.
    """
    weight, bias = rows.weight().double(), rows.bias()
    new = torch.stack(
        [(m.mT @ weight[list(group)]).sum(0) for group, m in zip(groups, maps, strict=True)]
    )
    if bias is None:
        return new, None
    return new, torch.stack(
        [_turned(bias[list(group)], m).sum(0) for group, m in zip(groups, maps, strict=True)]
    )  # type: ignore[union-attr]


def _turned(bias: Tensor | None, maps: Tensor) -> Tensor | None:
    return None if bias is None else (bias.double()[:, None] @ maps)[:, 0]


def _back(groups: Sequence[Sequence[int]]) -> Tensor:
    """Each original key/value head's number among the new ones."""
    found = torch.zeros(sum(map(len, groups)), dtype=torch.long)
    for number, group in enumerate(groups):
        found[list(group)] = number
    return found


def _geometry(held: Held) -> Geometry:
    if held.raw_k is None or held.raw_q is None:
        return Geometry(torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    return geometry(held.raw_k, held.calls[0].k, (held.raw_q, held.calls[0].q))


@contextmanager
def _as_they_were(sites: Sequence[Site]) -> Iterator[None]:
    """The sites' weights are afterwards what they were."""
    modules = [module for site in sites for module in _modules(site.slices(), site)]
    before = [(p, p.detach().clone()) for module in modules for p in module.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, kept in before:
                parameter.copy_(kept)


def _modules(rows: SiteSlices, site: Site) -> list[nn.Module]:
    return list(
        {id(m): m for m in (rows.q.module, rows.k.module, rows.v.module, site.out)}.values()
    )


def _chosen(sites: list[Site], layers: Sequence[int | str] | None) -> list[Site]:
    if layers is None:
        return sites
    known = sorted({site.layer for site in sites if site.layer is not None})
    labels = [site.label for site in sites]
    for layer in layers:
        if layer not in known and layer not in labels:
            raise MultiheadError(
                f"layers={list(layers)}: layer {layer} has no attention; this model's layers with"
                f" attention are {known[0]} to {known[-1]}"
                if known
                else f"layers={list(layers)}: this model has no layers"
            )
    return [site for site in sites if site.layer in layers or site.label in layers]


def _check(site: Site, n: int) -> None:
    rows = site.slices()
    if rows.layout == "latent":
        raise MultiheadError(
            f"{site.name}: its keys and values are made of a latent vector that all heads share"
            " already, so there is nothing to share"
        )
    has = rows.num_kv_heads
    if not head_layout(site).is_even:
        raise MultiheadError(
            f"{site.name}: its query heads share its key/value heads unevenly, as pruning of kind"
            " 'any' leaves them; share first and prune then, prune with kind='even' or 'uniform',"
            " or leave this layer out"
        )
    if isinstance(n, bool) or not isinstance(n, int) or n < 1 or has % n:
        fit = ", ".join(str(i) for i in range(1, has + 1) if has % i == 0)
        raise MultiheadError(
            f"kv_heads={n!r}: {site.name} has {has} key/value heads, which can't be put together in"
            f" {n!r} sets of one size; expected one of {fit}"
        )


def _named(argument: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise MultiheadError(f"{argument}={value!r}: expected one of {', '.join(known)}")
