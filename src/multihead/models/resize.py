"""Cutting attention down to some of its heads: the shapes, for a model with weights and for one
that waits for them alike.

The same function makes a pruned model of a whole one and, when a checkpoint is opened, the places
for its weights. What was cut is kept on each attention module as a `Cut`, and in the config of a
checkpoint under the name "multihead".
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from .site import Site, find_sites, uses_interface
from .slices import HeadSlices, SiteSlices, is_transposed, list_head_parameters, outputs_first
from .transformers import NAME, Cut, register_attention

__all__ = ["Dropped", "attend_unevenly", "cut_of", "narrow", "reshape", "why_whole"]

# What attention modules call their numbers of heads, and the widths that follow from them.
HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "heads",
    "num_q_heads",
    "num_query_heads",
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads", "num_kv")
GROUPS = ("num_key_value_groups", "num_queries_per_kv", "kv_groups", "n_rep")
WIDTHS = (
    "all_head_size",
    "inner_dim",
    "split_size",
    "q_size",
    "q_dim",
    "attn_dim",
    "embed_dim",
    "internal_dim",
    "proj_dim",
)
KV_WIDTHS = ("kv_dim", "kv_size")


class LayerConfig:
    """A model's config as one layer sees it: its own numbers of heads, all else the model's, also
    what is set later.
    """

    def __init__(self, config: Any, numbers: dict[str, int]) -> None:
        vars(self).update(_config=config, _numbers=numbers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in (
            "_config",
            "_numbers",
        ):  # asked for while it is being copied
            raise AttributeError(name)
        return self._numbers[name] if name in self._numbers else getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


class Dropped(nn.Module):
    """In place of attention without heads: what is left of it is the bias of its output projection.

    A cache still learns how many positions went by, from keys of width 1 (those of width 0 count as
    none). What made its queries keeps a weight without rows, so that a checkpoint can't be taken
    for one whose weights are missing, which plain transformers would draw at random.
    """

    def __init__(self, site: Site, inside: bool, returns: int) -> None:
        super().__init__()
        self.returns, self.layer_idx = (
            returns,
            None if site.kind == "cross" else getattr(site.module, "layer_idx", None),
        )
        self.out = site.out_name.rpartition(".")[2] if inside else None
        if self.out is not None:  # by the name that the checkpoint has it by
            self.add_module(self.out, Bias(site.out))
        name = site.slices().q.name
        weight = getattr(site.module, name).weight
        self.add_module(name, Empty(weight.new_empty(0)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        cache = kwargs.get("cache", kwargs.get("past_key_values", kwargs.get("layer_past")))
        cache = getattr(cache, "self_attention_cache", cache)
        if cache is not None and self.layer_idx is not None:
            cache.update(
                *[x.new_zeros(x.shape[0], 1, x.shape[1], width) for width in (1, 0)], self.layer_idx
            )
        y = x.new_zeros(*x.shape[:-1], 0)
        if self.out is not None:
            y = self._modules[self.out](y)  # type: ignore[misc]
        return (y, *[None] * (self.returns - 1)) if self.returns else y


class Empty(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Bias(nn.Module):
    """What an output projection does without inputs."""

    def __init__(self, out: nn.Module) -> None:
        super().__init__()
        self.in_features, self.out_features = 0, outputs_first(out).shape[0]
        self.bias = getattr(out, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        return self.bias.expand(*x.shape[:-1], -1).to(x.dtype)


def cut_of(site: Site) -> Cut:
    """What of the config's model the site still holds: all of it where nothing was cut."""
    found: Cut | None = getattr(site.module, NAME, None)
    if found is not None:
        return found
    heads, groups = site.num_heads, site.slices().num_kv_heads
    return Cut(
        tuple(range(heads)),
        tuple(range(groups)),
        tuple(h * groups // heads for h in range(heads)),
        tuple(range(heads)),
        heads,
    )


def _wide_norm(site: Site) -> str | None:
    """The name of a norm that runs over all heads at once: without some of them it would norm the
    others otherwise.
    """
    for name, part in site.module.named_children():
        gain = getattr(part, "weight", None)
        if (
            "norm" in name
            and isinstance(gain, Tensor)
            and gain.ndim == 1
            and site.num_heads > 1
            and gain.shape[0] in (site.num_heads * site.head_dim, _q_width(site))
        ):
            return name
    return None


def why_whole(site: Site) -> str:
    """Why the site's heads can't be cut; "" where they can, as far as its parts tell."""
    try:
        site.slices()
    except ValueError as error:
        return str(error)
    name = _wide_norm(site)
    return (
        ""
        if name is None
        else (
            f"{site.name} ({type(site.module).__name__}) can't be pruned: its {name} runs over all "
            "heads at once, so without some of them the others would change"
        )
    )


@torch.no_grad()
def narrow(
    model: nn.Module,
    site: Site,
    heads: Sequence[int],
    kv: Sequence[int],
    reads: Sequence[int],
    *,
    layout: str | None = None,
    bias: bool = False,
    returns: int | None = None,
) -> None:
    """Cuts a site in place to query heads `heads`, in that order, and key/value heads `kv`;
    `reads[i]` is the place in `kv` of what the i-th of them reads.

    `bias`: W_O gets a bias of zeros where it has none. `returns`: how many values its forward
    returns, for a site that keeps no head (0: a tensor alone). Raises `ValueError` where the
    family's layout can't express it.
    """
    before, out = cut_of(site), site.slices().out.module
    if bias and getattr(out, "bias", None) is None:
        out.bias = _parameter(out.weight, outputs_first(out).new_zeros(outputs_first(out).shape[0]))
    after = Cut(
        tuple(before.heads[h] for h in heads),
        tuple(before.kv[g] for g in kv),
        tuple(reads),
        tuple(before.numbers[h] for h in heads),
        before.of,
        before.layout if layout is None else layout,
        before.bias or bias,
        returns,
    )
    if not heads:
        _drop(model, site, returns)
        _remember(model, site, after)
        return
    if why := why_whole(site):
        raise MultiheadError(why)
    found = site.slices(after.layout)
    old_q, old_kv = _q_width(site), found.v.index.numel()
    extras = list_head_parameters(site)
    for rows, index in _kept_rows(site, found, heads, kv, reads).values():
        _keep_outputs(rows.module, index)
    for name, index in extras.items():
        _keep_extra(site, name, index, heads if index.shape[0] == site.num_heads else kv)
    numbers: dict[str, Any] = _numbers(
        site.module,
        len(heads),
        len(kv),
        old_q,
        found.q.index.shape[1] * len(heads),
        old_kv,
        found.v.index.shape[1] * len(kv),
    )
    columns = (
        torch.arange(site.num_heads * site.head_dim).view(site.num_heads, -1)[list(heads)].flatten()
    )
    _keep_inputs(out, columns)
    site.__dict__.pop("num_heads", None)  # counted again
    if hasattr(
        site.module, "split_size"
    ):  # GPT-2 cuts by it, and takes several sizes as well as one
        q_size, kv_size = found.q.index.shape[1] * len(heads), found.v.index.shape[1] * len(kv)
        apart = found.q.name != found.k.name or q_size == kv_size
        numbers["split_size"] = kv_size if apart else [q_size, kv_size, kv_size]
    for name, value in numbers.items():
        setattr(site.module, name, value)
    _own_config(site.module, len(heads), len(kv))
    _remember(model, site, after)


def reshape(model: nn.Module, cuts: Mapping[str, Mapping[str, Any]]) -> None:
    """Cuts the model that a config describes to the shapes that its "multihead" entry tells, site
    by site.
    """
    sites = {site.name: site for site in find_sites(model)}
    for name, told in cuts.items():
        if name not in sites:
            raise MultiheadError(
                f"the config says that {name!r} was pruned, which {type(model).__name__} doesn't"
                f" have; its attention is {', '.join(list(sites)[:3])}, ..."
            )
        cut = Cut.of_json(told)
        narrow(
            model,
            sites[name],
            cut.heads,
            cut.kv,
            cut.reads,
            layout=cut.layout,
            bias=cut.bias,
            returns=cut.returns,
        )
        setattr(
            model.get_submodule(name), NAME, cut
        )  # which knows what the heads were called before


def _remember(model: nn.Module, site: Site, cut: Cut) -> None:
    module = model.get_submodule(site.name)
    setattr(module, NAME, cut)
    forward = inspect.unwrap(type(module).forward)
    biased = "position_bias" in forward.__code__.co_varnames and len(cut.heads) != cut.of
    grouped = len(cut.kv) not in (0, len(cut.heads)) and not any(
        hasattr(module, name) for name in GROUPS + KV_HEADS
    )
    for key in [
        key for key, hook in module._forward_pre_hooks.items() if hook is _guard
    ]:  # of an earlier cut
        del module._forward_pre_hooks[key]
    if not cut.even or biased or grouped:  # grouped: in a family that knows no groups
        if not uses_interface(module):
            if cut.heads:
                raise MultiheadError(
                    f"{site.name} ({type(module).__name__}): its query heads would share its"
                    " key/value heads in a way that only modules of transformers can; choose"
                    " kind='even', 'groups' or 'uniform'"
                )
            return
        module.register_forward_pre_hook(_guard)


def attend_unevenly(model: Any) -> None:
    """Chooses the implementation of attention that a pruned model needs, where others would not
    do.
    """
    if any(
        hook is _guard for module in model.modules() for hook in module._forward_pre_hooks.values()
    ):
        register_attention()
        model.set_attn_implementation(NAME)


def _guard(module: Any, args: Any) -> None:
    """Other implementations would share out the key/value heads evenly, or not at all, and that
    without a word.
    """
    if module.config._attn_implementation != NAME:
        raise MultiheadError(
            f"attn_implementation={module.config._attn_implementation!r}: this model's heads share"
            f" keys and values in a way that only attn_implementation={NAME!r} computes; call"
            f" model.set_attn_implementation({NAME!r})"
        )


def _kept_rows(
    site: Site, found: SiteSlices, heads: Sequence[int], kv: Sequence[int], reads: Sequence[int]
) -> dict[str, tuple[HeadSlices, Tensor]]:
    """For each projection, the rows that stay, in their new order."""
    q, k, v = found.q.index[list(heads)], found.k.index[list(kv)], found.v.index[list(kv)]
    if found.layout == "separate":
        return {
            rows.name: (rows, index.flatten())
            for rows, index in ((found.q, q), (found.k, k), (found.v, v))
        }
    if found.layout == "blocks":
        parts = [q.flatten(), k.flatten(), v.flatten()]
        if found.q.name != found.k.name:
            return {
                found.q.name: (found.q, parts[0]),
                found.k.name: (found.k, torch.cat(parts[1:])),
            }
        return {found.q.name: (found.q, torch.cat(parts))}
    each, left = divmod(len(heads), len(kv))
    if (
        left
        or list(reads) != [i // each for i in range(len(heads))]
        or (found.layout != "groups" and each != 1)
    ):
        raise MultiheadError(
            f"{site.name} ({type(site.module).__name__}): {found.k.name} holds keys and values next"
            " to their "
            f"{'heads' if found.layout != 'groups' else 'groups'}, so {len(heads)} heads can't read"
            f" {len(kv)} of "
            "them;"
            f" {'each head keeps its own' if found.layout != 'groups' else 'groups stay of one size'}"
        )
    if found.layout == "latent":
        return {
            found.q.name: (found.q, q.flatten()),
            found.k.name: (found.k, torch.cat([k, v], 1).flatten()),
        }
    return {found.q.name: (found.q, torch.cat([q.view(len(kv), -1), k, v], 1).flatten())}


def _keep_outputs(module: nn.Module, index: Tensor) -> None:
    index = index.to(outputs_first(module).device)
    _put(module, outputs_first(module)[index])
    if getattr(module, "bias", None) is not None:
        bias: Tensor = module.bias  # type: ignore[assignment]
        module.bias = _parameter(bias, bias.data[index])
    for name in ("out_features", "nf"):
        if hasattr(module, name):
            setattr(module, name, len(index))


def _keep_inputs(module: nn.Module, index: Tensor) -> None:
    index = index.to(outputs_first(module).device)
    _put(module, outputs_first(module)[:, index])
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
        for own, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, own, _parameter(parameter, parameter.data[list(kept)]))


def _put(module: nn.Module, value: Tensor) -> None:
    module.weight = _parameter(module.weight, value.T if is_transposed(module) else value)


def _parameter(old: Any, data: Tensor) -> nn.Parameter:
    return nn.Parameter(
        data.clone(memory_format=torch.contiguous_format), requires_grad=old.requires_grad
    )


def _q_width(site: Site) -> int:
    """Outputs of W_Q that make queries."""
    try:
        return site.slices().q.index.numel()
    except ValueError:
        return site.num_heads * site.head_dim


def _numbers(
    module: nn.Module, heads: int, kv: int, old_q: int, q: int, old_kv: int, kv_width: int
) -> dict[str, int]:
    """The attributes that follow from the numbers of heads, with what they become. Those that mean
    something else stay: a width is one of these only where it has the old size, and the model's
    width only where the forward pass cuts by it.
    """
    own = vars(module)
    read = inspect.unwrap(type(module).forward).__code__.co_names
    shared = (
        "position_bias" in inspect.unwrap(type(module).forward).__code__.co_varnames
    )  # T5: of all heads, for all layers
    found = {name: heads for name in HEADS if isinstance(own.get(name), int) and not shared}
    found |= {name: kv for name in KV_HEADS if isinstance(own.get(name), int)}
    found |= {
        name: heads // kv if heads % kv == 0 else 1
        for name in GROUPS
        if isinstance(own.get(name), int)
    }
    found |= {
        name: q
        for name in WIDTHS
        if own.get(name) == old_q and (name != "embed_dim" or name in read)
    }
    return found | {name: kv_width for name in KV_WIDTHS if own.get(name) == old_kv}


def _own_config(module: Any, heads: int, kv: int) -> None:
    """Where the forward pass asks the model's config for the numbers of heads (Phi-3), the module
    gets a config of its own.
    """
    read = inspect.unwrap(type(module).forward).__code__.co_names
    asked = {
        name: heads if name in HEADS else kv
        for name in HEADS + KV_HEADS
        if name in read and name not in vars(module)
    }
    config = getattr(module, "config", None)
    asked = {name: value for name, value in asked.items() if hasattr(config, name)}
    if asked:
        module.config = LayerConfig(getattr(config, "_config", config), asked)


def _drop(model: nn.Module, site: Site, returns: int | None) -> None:
    if returns is None or not uses_interface(site.module):
        raise MultiheadError(
            f"{site.name} ({type(site.module).__name__}) can't go without any head; keep at"
            " least one"
        )
    inside = site.out_name.startswith(f"{site.name}.")
    for path, new in (
        (site.out_name, None if inside else Bias(site.out)),
        (site.name, Dropped(site, inside, returns)),
    ):
        if new is not None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new)
