"""Foresee whether plain transformers will load a model, before any work: its heads are cut on a
copy that has shapes and no memory, and `models.plain` searches for a config of it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import MultiheadError, MultiheadWarning
from ..models.head_layout import HeadLayout
from ..models.instrument import suspend
from ..models.introspect import inner_model
from ..models.plain import Plain, find_plain_config
from ..models.resize import head_layout, resize_heads
from ..models.site import Site, find_sites
from .plan import Plan, query_groups, uniform_sizes

__all__ = ["foresee_pruned", "foresee_shared", "warn_unless_plain", "warn_unless_plain_shared"]

Kept = Mapping[str, Sequence[int]]  # query heads by the name of their site


def warn_unless_plain(
    model: nn.Module, amount: int | Plan, *, compensate: str | None = None
) -> None:
    """Warn if plain transformers won't load what pruning by kind "uniform" makes of a model.

    The warning names the number or setting in the way, and what would do: the nearest share of the
    heads, or pruning without a bias.

    Args:
        amount: heads to remove in all layers together, or the plan.
        compensate: as of `multihead.prune`; all but "none" add a bias to the output projection.
    """
    sites = find_sites(model)
    has_bias = compensate != "none"
    if isinstance(amount, Plan):
        removed = amount.by_site(sites)
        kept: Kept = {
            s.name: [h for h in range(s.num_heads) if h not in removed.get(s.name, [])]
            for s in sites
        }
        tries, heads = [kept], len(kept[sites[0].name])
        _, sizes = uniform_sizes(sites, sum(map(len, removed.values())))
    else:
        near, sizes = uniform_sizes(sites, amount)
        tries = [_keep(sites, *size) for size in near]
        heads = near[0][0] * near[0][1]
    found = [foresee_pruned(model, kept, has_bias=has_bias) for kept in tries]
    if any(found):
        return
    whole = sites[0].num_heads
    if has_bias and any(foresee_pruned(model, kept, has_bias=False) for kept in tries):
        advice = ""
    else:
        others = sorted({g * m for g, m in sizes} - {heads}, key=lambda n: (abs(n - heads), -n))

        def is_plain(number: int) -> bool:
            options = [_keep(sites, g, m) for g, m in sizes if g * m == number]
            return any(foresee_pruned(model, kept, has_bias=has_bias) for kept in options)

        nearest = next(filter(is_plain, others), None)
        advice = (
            "; no other share does either"
            if nearest is None
            else f"; the nearest share that it loads is {_percent(1 - nearest / whole)}"
            f" ({nearest} of {whole} heads left in each layer)"
        )
    _warn(
        f"kind='uniform' with {heads} of {whole} heads left in each layer"
        f" ({_percent(1 - heads / whole)} removed): plain transformers won't load the checkpoint,"
        f" only multihead.load: {found[0].reason}{advice}",
        callers=3,
    )


def warn_unless_plain_shared(model: nn.Module, num_kv_heads: int) -> None:
    """Warn if plain transformers won't load a model whose layers share key/value heads."""
    found = foresee_shared(model, num_kv_heads)
    if not found:
        _warn(
            f"num_kv_heads={num_kv_heads}: plain transformers won't load the checkpoint, only"
            f" multihead.load: {found.reason}",
            callers=2,
        )


def foresee_pruned(model: nn.Module, kept: Kept, *, has_bias: bool = False) -> Plain:
    """Foresee whether plain transformers will load a model with only these heads, by its config and
    the shapes of its parameters.

    Args:
        kept: query heads by the name of their site.
        has_bias: whether the output projections get a bias.

    >>> import multihead
    >>> model, _ = multihead.load_builtin()
    >>> kept = {site.name: range(5) for site in multihead.models.find_sites(model)}
    >>> foresee_pruned(model, kept).reason
    'hidden_size 192 is not a multiple of 5 heads'
    """

    def layout(site: Site) -> HeadLayout:
        reads, heads = head_layout(site).reads, sorted(kept[site.name])
        groups = sorted({reads[h] for h in heads})
        return _layout(heads, groups, [groups.index(reads[h]) for h in heads], has_bias)

    return _foresee(model, layout)


def foresee_shared(model: nn.Module, num_kv_heads: int) -> Plain:
    """Foresee whether plain transformers will load a model with so many key/value heads in each
    layer.
    """

    def layout(site: Site) -> HeadLayout:
        count = site.num_heads
        reads = [h * num_kv_heads // count for h in range(count)]
        return _layout(range(count), range(num_kv_heads), reads, False)

    return _foresee(model, layout)


def _foresee(model: nn.Module, layout: Callable[[Site], HeadLayout]) -> Plain:
    twin = inner_model(_on_meta(model))
    for site in find_sites(twin):
        try:
            resize_heads(twin, site, layout(site))
        except MultiheadError as error:
            return Plain(reason=str(error))
    return find_plain_config(twin)


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy whose tensors have shapes and no memory."""
    memo: dict[int, Any] = {id(x): x.detach().to("meta") for x in model.buffers()}
    for x in model.parameters():
        memo[id(x)] = nn.Parameter(x.detach().to("meta"), requires_grad=x.requires_grad)
    with suspend(model):  # without the hooks of a reading around it
        return copy.deepcopy(model, memo)


def _layout(
    heads: Sequence[int], kv_heads: Sequence[int], reads: Sequence[int], has_bias: bool
) -> HeadLayout:
    return HeadLayout(
        tuple(heads), tuple(kv_heads), tuple(reads), tuple(heads), len(heads), has_bias=has_bias
    )


def _keep(sites: Sequence[Site], groups: int, size: int) -> Kept:
    """The first heads of the first groups of each layer."""
    return {
        site.name: [h for group in query_groups(site)[:groups] for h in group[:size]]
        for site in sites
    }


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _warn(message: str, callers: int) -> None:
    """Warn where the user's code calls `prune` or `share`, so many calls up."""
    warnings.warn(message, MultiheadWarning, stacklevel=2 + callers)
