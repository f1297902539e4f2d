"""Resize an attention module to some of its heads: projections, per-head parameters and counts.

The same function cuts a model with weights and, when the checkpoint of a pruned model is opened,
a model that waits for its weights. A module keeps its `HeadLayout` as the attribute `multihead`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from .head_layout import HeadLayout
from .introspect import list_inner_models
from .names import LAYOUTS, find_number, names_of
from .site import Site, find_sites, uses_interface
from .slices import HeadSlices, SiteSlices, is_transposed, list_head_parameters, outputs_first
from .transformers import NAME, register_attention

__all__ = [
    "NoHeadsAttention",
    "head_layout",
    "resize_as_configured",
    "resize_heads",
    "set_required_attention",
    "unprunable_reason",
]


class LayerConfig:
    """View of a model's config with the head counts of one layer; all else is the model's, also
    what is set later.
    """

    def __init__(self, config: Any, counts: dict[str, int]) -> None:
        vars(self).update(_config=config, _counts=counts)

    def __getattr__(self, name: str) -> Any:
        # these two are asked for while the object is being copied, before they exist
        if name.startswith("__") or name in ("_config", "_counts"):
            raise AttributeError(name)
        return self._counts[name] if name in self._counts else getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


class NoHeadsAttention(nn.Module):
    """Attention module without heads: its output is the bias of its output projection.

    A KV cache still counts the positions, by keys of width 1 (keys of width 0 count as none). The
    query projection keeps a weight without rows: without it a checkpoint would look as if weights
    were missing, and plain transformers would initialise them at random.
    """

    def __init__(self, site: Site, inside: bool, num_returns: int) -> None:
        super().__init__()
        self.num_returns = num_returns
        self.layer_idx = None if site.kind == "cross" else getattr(site.module, "layer_idx", None)
        # under the name that the checkpoint has it by
        self.out = site.out_name.rpartition(".")[2] if inside else None
        if self.out is not None:
            self.add_module(self.out, BiasOnlyProjection(site.out))
        name = site.slices().q.name
        weight = getattr(site.module, name).weight
        self.add_module(name, PlaceholderWeight(weight.new_empty(0)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        cache = kwargs.get("cache", kwargs.get("past_key_values", kwargs.get("layer_past")))
        cache = getattr(cache, "self_attention_cache", cache)
        if cache is not None and self.layer_idx is not None:
            k, v = (x.new_zeros(x.shape[0], 1, x.shape[1], width) for width in (1, 0))
            cache.update(k, v, self.layer_idx)
        y = x.new_zeros(*x.shape[:-1], 0)
        if self.out is not None:
            y = self._modules[self.out](y)  # type: ignore[misc]
        return (y, *[None] * (self.num_returns - 1)) if self.num_returns else y


class PlaceholderWeight(nn.Module):
    """A parameter without elements, under a projection's name."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class BiasOnlyProjection(nn.Module):
    """Output projection `[..., 0] -> [..., D]` without inputs: its bias, or zeros."""

    def __init__(self, out: nn.Module) -> None:
        super().__init__()
        self.in_features, self.out_features = 0, outputs_first(out).shape[0]
        self.bias = getattr(out, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        return self.bias.expand(*x.shape[:-1], -1).to(x.dtype)


# ---- what a site has, and whether it can be cut


def head_layout(site: Site) -> HeadLayout:
    """The heads that a site has; all heads of the config's model unless some were cut."""
    layout: HeadLayout | None = getattr(site.module, NAME, None)
    if layout is not None:
        return layout
    num_heads, num_kv_heads = site.num_heads, site.slices().num_kv_heads
    return HeadLayout(
        tuple(range(num_heads)),
        tuple(range(num_kv_heads)),
        tuple(h * num_kv_heads // num_heads for h in range(num_heads)),
        tuple(range(num_heads)),
        num_heads,
    )


def unprunable_reason(site: Site) -> str:
    """Why the heads of a site can't be cut; "" if they can, as far as its parameters show."""
    try:
        site.slices()
    except ValueError as error:
        return str(error)
    norm = _norm_over_heads(site)
    if norm is None:
        return ""
    return (
        f"{site.name} ({type(site.module).__name__}) can't be pruned: its {norm} normalises over"
        " all heads at once, so removing some of them would change the others"
    )


def _norm_over_heads(site: Site) -> str | None:
    """The name of a norm over the queries or outputs of all heads at once."""
    if find_number(site.module, names_of(site.module).kv_latent_dim):
        return None  # norms of latents, which may be as wide
    for name, part in site.module.named_children():
        gain = getattr(part, "weight", None)
        if (
            "norm" in name
            and isinstance(gain, Tensor)
            and gain.ndim == 1
            and site.num_heads > 1
            and gain.shape[0] in (site.num_heads * site.head_dim, _query_width(site))
        ):
            return name
    return None


# ---- resizing


@torch.no_grad()
def resize_heads(model: nn.Module, site: Site, layout: HeadLayout) -> None:
    """Cut a site in place to the heads of `layout`, whose `heads` and `kv_heads` number those that
    the site has now, in their new order.

    `has_bias` adds a bias of zeros to W_O if it has none; `num_returns` is needed if no head stays.
    The site's `HeadLayout` is then in terms of the config's heads.

    Raises:
        MultiheadError: the layout of the family's projections can't express these heads.
    """
    before, out = head_layout(site), site.slices().out.module
    if layout.has_bias and getattr(out, "bias", None) is None:
        out.bias = _parameter(out.weight, outputs_first(out).new_zeros(outputs_first(out).shape[0]))
    after = HeadLayout(
        tuple(before.heads[h] for h in layout.heads),
        tuple(before.kv_heads[g] for g in layout.kv_heads),
        layout.reads,
        tuple(before.original_heads[h] for h in layout.heads),
        before.config_num_heads,
        before.fused_layout if layout.fused_layout is None else layout.fused_layout,
        before.has_bias or layout.has_bias,
        layout.num_returns,
    )
    if layout.heads:
        _cut_parameters(site, replace(layout, fused_layout=after.fused_layout))
    else:
        _replace_attention(model, site, layout.num_returns)
    _set_layout(model, site, after)


def _cut_parameters(site: Site, layout: HeadLayout) -> None:
    if reason := unprunable_reason(site):
        raise MultiheadError(reason)
    heads, kv_heads, out = list(layout.heads), list(layout.kv_heads), site.slices().out.module
    parts = site.slices(layout.fused_layout)
    old_q, old_kv = _query_width(site), parts.v.index.numel()
    new_q, new_kv = (parts.q.index.shape[1] * len(heads), parts.v.index.shape[1] * len(kv_heads))
    extras = list_head_parameters(site)
    for rows, index in _kept_rows(site, parts, layout).values():
        _keep_outputs(rows.module, index)
    for name, index in extras.items():
        _keep_extra(site, name, index, heads if index.shape[0] == site.num_heads else kv_heads)
    counts: dict[str, Any] = _head_counts(site, len(heads), len(kv_heads))
    counts |= _widths(site.module, (old_q, new_q), (old_kv, new_kv))
    columns = torch.arange(site.num_heads * site.head_dim, device="cpu").view(site.num_heads, -1)
    _keep_inputs(out, columns[heads].flatten())
    if hasattr(site.module, "split_size"):  # GPT-2 splits by it: one size, or a list of sizes
        is_single = parts.q.name != parts.k.name or new_q == new_kv
        counts["split_size"] = new_kv if is_single else [new_q, new_kv, new_kv]
    for name, value in counts.items():
        setattr(site.module, name, value)
    _set_layer_config(site.module, len(heads), len(kv_heads))


def resize_as_configured(model: nn.Module, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Cut a whole model to the layouts `entries` of its config, from site name to JSON."""
    sites = {site.name: site for site in find_sites(model)}
    for name, entry in entries.items():
        if name not in sites:
            raise MultiheadError(
                f"the config has a pruned attention module {name!r}, which {type(model).__name__}"
                f" doesn't have; its attention modules are {', '.join(list(sites)[:3])}, ..."
            )
        try:
            layout = HeadLayout.from_json(entry)
            layout.require_heads(sites[name].num_heads, sites[name].slices().num_kv_heads)
            if layout.fused_layout not in (None, *LAYOUTS):
                raise MultiheadError(f"its layout is {layout.fused_layout!r}")
        except MultiheadError as error:
            raise MultiheadError(
                f"the config's entry for the pruned attention module {name!r} is damaged: {error};"
                " copy the checkpoint again"
            ) from error
        resize_heads(model, sites[name], layout)
        # with the numbers that the heads had before an earlier pruning
        setattr(model.get_submodule(name), NAME, layout)


def _replace_attention(model: nn.Module, site: Site, num_returns: int | None) -> None:
    if num_returns is None or not uses_interface(site.module):
        raise MultiheadError(
            f"{site.name} ({type(site.module).__name__}) can't run without any head; keep at least"
            " one"
        )
    inside = site.out_name.startswith(f"{site.name}.")
    new: dict[str, nn.Module] = {site.name: NoHeadsAttention(site, inside, num_returns)}
    if not inside:
        new = {site.out_name: BiasOnlyProjection(site.out)} | new
    for path, module in new.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)


# ---- which implementation of attention the result needs


def _set_layout(model: nn.Module, site: Site, layout: HeadLayout) -> None:
    module = model.get_submodule(site.name)
    names = names_of(module)
    setattr(module, NAME, layout)
    arguments = inspect.unwrap(type(module).forward).__code__.co_varnames
    all_heads = tuple(range(layout.config_num_heads))  # also another order is another bias
    is_biased = "position_bias" in arguments and layout.heads != all_heads
    # key/value heads in a family that has no grouped queries
    is_grouped = len(layout.kv_heads) not in (0, len(layout.heads)) and not any(
        hasattr(module, name) for name in (*names.group_size, *names.num_kv_heads)
    )
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _require_ours]:
        del hooks[key]  # of an earlier cut
    if not layout.is_even or is_biased or is_grouped:
        if not uses_interface(module):
            if layout.heads:
                raise MultiheadError(
                    f"{site.name} ({type(module).__name__}): its query heads would share its"
                    " key/value heads unevenly, which only attention modules of transformers can"
                    " compute; choose kind='even', 'groups' or 'uniform'"
                )
            return
        module.register_forward_pre_hook(_require_ours)


def set_required_attention(model: Any) -> None:
    """Set the attention implementation "multihead" if some layer of the model needs it."""
    if any(
        hook is _require_ours
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    ):
        register_attention()
        for inner in list_inner_models(model) or [model]:
            inner.set_attn_implementation(NAME)


def _require_ours(module: Any, args: Any) -> None:
    """Raise under any other implementation: it would silently read other key/value heads."""
    if module.config._attn_implementation != NAME:
        raise MultiheadError(
            f"attn_implementation={module.config._attn_implementation!r}: this model's query heads"
            f" share key/value heads in a way that only attn_implementation={NAME!r} computes; call"
            f" model.set_attn_implementation({NAME!r})"
        )


# ---- parameters


def _kept_rows(
    site: Site, parts: SiteSlices, layout: HeadLayout
) -> dict[str, tuple[HeadSlices, Tensor]]:
    """For each projection module, the rows that stay, in their new order."""
    num_heads, num_kv_heads = len(layout.heads), len(layout.kv_heads)
    q = parts.q.index[list(layout.heads)]
    k, v = (rows.index[list(layout.kv_heads)] for rows in (parts.k, parts.v))
    if parts.layout == "separate":
        return {
            rows.name: (rows, index.flatten())
            for rows, index in ((parts.q, q), (parts.k, k), (parts.v, v))
        }
    if parts.layout == "blocks":
        blocks = [q.flatten(), k.flatten(), v.flatten()]
        if parts.q.name != parts.k.name:
            return {
                parts.q.name: (parts.q, blocks[0]),
                parts.k.name: (parts.k, torch.cat(blocks[1:])),
            }
        return {parts.q.name: (parts.q, torch.cat(blocks))}
    size, rest = divmod(num_heads, num_kv_heads)
    by_group = parts.layout == "groups"
    if (
        rest
        or list(layout.reads) != [i // size for i in range(num_heads)]
        or (not by_group and size != 1)
    ):
        raise MultiheadError(
            f"{site.name} ({type(site.module).__name__}): {parts.k.name} stores keys and values by"
            f" {'group' if by_group else 'head'}, so {num_heads} heads can't read {num_kv_heads} of"
            f" them; {'groups must stay of one size' if by_group else 'each head keeps its own'}"
        )
    if parts.layout == "latent":
        return {
            parts.q.name: (parts.q, q.flatten()),
            parts.k.name: (parts.k, torch.cat([k, v], 1).flatten()),
        }
    return {parts.q.name: (parts.q, torch.cat([q.view(num_kv_heads, -1), k, v], 1).flatten())}


def _keep_outputs(module: nn.Module, index: Tensor) -> None:
    index = index.to(outputs_first(module).device)
    _set_weight(module, outputs_first(module)[index])
    if getattr(module, "bias", None) is not None:
        bias: Tensor = module.bias  # type: ignore[assignment]
        module.bias = _parameter(bias, bias.data[index])
    for name in ("out_features", "nf"):
        if hasattr(module, name):
            setattr(module, name, len(index))


def _keep_inputs(module: nn.Module, index: Tensor) -> None:
    index = index.to(outputs_first(module).device)
    _set_weight(module, outputs_first(module)[:, index])
    for name in ("in_features", "nx"):
        if hasattr(module, name):
            setattr(module, name, len(index))


def _keep_extra(site: Site, name: str, index: Tensor, kept: Sequence[int]) -> None:
    part: Any = getattr(site.module, name)
    if isinstance(part, nn.Linear):
        _keep_outputs(part, index[list(kept)].flatten())
    elif isinstance(part, nn.Parameter):
        setattr(site.module, name, _parameter(part, part.data[list(kept)]))
    else:
        for parameter_name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, parameter_name, _parameter(parameter, parameter.data[list(kept)]))


def _set_weight(module: nn.Module, value: Tensor) -> None:
    module.weight = _parameter(module.weight, value.T if is_transposed(module) else value)


def _parameter(old: Any, data: Tensor) -> nn.Parameter:
    return nn.Parameter(
        data.clone(memory_format=torch.contiguous_format), requires_grad=old.requires_grad
    )


# ---- attributes that hold counts and widths


def _query_width(site: Site) -> int:
    """Outputs of W_Q that are queries."""
    try:
        return site.slices().q.index.numel()
    except ValueError:
        return site.num_heads * site.head_dim


def _head_counts(site: Site, num_heads: int, num_kv_heads: int) -> dict[str, int]:
    """New values of the module's attributes that hold numbers of heads."""
    attributes, names = vars(site.module), names_of(site.module)
    arguments = inspect.unwrap(type(site.module).forward).__code__.co_varnames
    size = num_heads // num_kv_heads if num_heads % num_kv_heads == 0 else 1
    counts = dict.fromkeys(names.num_kv_heads, num_kv_heads) | dict.fromkeys(names.group_size, size)
    if "position_bias" not in arguments:  # T5's is made once, of all heads, for all layers
        old = [name for name in names.num_heads if attributes.get(name) == site.num_heads]
        counts |= dict.fromkeys(old, num_heads)
    return {name: count for name, count in counts.items() if isinstance(attributes.get(name), int)}


def _widths(module: nn.Module, q: tuple[int, int], kv: tuple[int, int]) -> dict[str, int]:
    """New values of the attributes that hold widths, given (old, new) of queries and of values.

    An attribute counts only if it has the old size, and the model's width only if the forward pass
    splits by it.
    """
    attributes = vars(module)
    read = inspect.unwrap(type(module).forward).__code__.co_names
    names = names_of(module)
    q_names = [name for name in names.q_width if name != "embed_dim" or name in read]
    widths = {name: q[1] for name in q_names if attributes.get(name) == q[0]}
    return widths | {name: kv[1] for name in names.kv_width if attributes.get(name) == kv[0]}


def _set_layer_config(module: Any, num_heads: int, num_kv_heads: int) -> None:
    """Give the module a `LayerConfig` if its forward pass reads head counts from the model's config
    (Phi-3).
    """
    read = inspect.unwrap(type(module).forward).__code__.co_names
    config, names = getattr(module, "config", None), names_of(module)
    values = dict.fromkeys(names.num_kv_heads, num_kv_heads)
    values |= dict.fromkeys(names.num_heads, num_heads)
    counts = {
        name: value
        for name, value in values.items()
        if name in read and name not in vars(module) and hasattr(config, name)
    }
    if counts:
        module.config = LayerConfig(getattr(config, "_config", config), counts)
