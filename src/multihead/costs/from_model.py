"""From a model to the `Shape` of each of its attention modules: sizes, masks, caches, and all
parameters next to the projections. The model may lie on the meta device, without memory.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn

from ..layers.latent import LatentAttention
from ..layers.model_attention import ModelAttention
from ..models.introspect import is_encoder_decoder
from ..models.labels import label_paths
from ..models.names import find_number, names_of, projection_role
from ..models.site import Site, find_attention
from ..models.slices import in_features, inner_weight
from ..ops.masks import IntervalMask
from .probe import Held, has_only_keys, probe_cache
from .shape import Extra, Kept, Shape, require_even
from .states import State

CACHE_ARGUMENTS = {"cache", "past_key_values", "past_key_value", "layer_past"}
# Which of queries, keys and values a projection makes, by its role.
LETTERS = {"q": "q", "q_down": "q", "k": "k", "kv_down": "k", "v": "v", "kv": "kv", "qkv": "qkv"}


def shapes_of(
    model: nn.Module, config: Any, twin: nn.Module | None
) -> tuple[list[Shape], list[State], list[str]]:
    """The shape of every attention module of a model, the states of modules that keep one of
    constant size, and notes on what is not counted.

    Args:
        model: any model.
        config: its config; None for a user-defined module.
        twin: the same model on the meta device, whose cache is counted; None without one.
    """
    layers = _cache_layers(config)
    if is_encoder_decoder(config):
        twin = None
    held = {} if twin is None or has_only_keys(layers) else probe_cache(twin)
    keeping = [name for name, one in held.items() if one.states and not one.keys]
    sites, notes = find_attention(model, keeping)
    num_names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    caches: dict[int, list[Any]] = {}
    shapes = []
    for site in sites:
        stated = _stating_module(site, model)
        layer_config = getattr(stated, "config", config)
        if id(layer_config) not in caches:
            caches[id(layer_config)] = _cache_layers(layer_config)
        cache, masked = caches[id(layer_config)], _is_masked(site, model)
        shape = _shape(site, stated, layer_config, cache, masked)
        shapes.append(
            replace(
                shape,
                calls=_num_calls(num_names[id(site.module)], layer_config),
                encoder=is_encoder_decoder(config) and site.stack == "encoder",
            )
        )
    own = sum(shape.calls for shape in shapes if any(shape.cache_widths) and not shape.cross)
    if layers and not held and twin is not None and own != sum(map(_is_kept, layers)):
        held = probe_cache(
            twin
        )  # the model has attention that its cache doesn't hold, or more often
    if held:
        shapes = [_as_cached(s, [h for n, h in held.items() if _is_in(n, s.name)]) for s in shapes]
    inside = [site.name for site in sites]
    states = [
        _state(model.get_submodule(name), one, name, label, inside)
        for (name, one), label in zip(
            ((n, h) for n, h in held.items() if h.states),
            label_paths([n for n, h in held.items() if h.states]),
            strict=True,
        )
    ]
    return shapes, states, notes


def _is_kept(layer: Any) -> bool:
    """Whether a layer of a cache holds anything."""
    return "Dummy" not in type(layer).__name__


def _is_in(name: str, outer: str) -> bool:
    """Whether a module path is another one, or of a module inside it."""
    return f"{name}.".startswith(f"{outer}.")


def _as_cached(shape: Shape, held: list[Held]) -> Shape:
    """The shape with what transformers was seen to cache for the module."""
    keys = next((one for one in held if one.keys), None)
    if keys is None:
        return shape if shape.cross or not shape.has_keys else replace(shape, cached=False)
    return replace(
        shape,
        calls=max(shape.calls, keys.layers),
        window=None if keys.whole else shape.window,
        stored=keys.keys,
        index=tuple(kept for one in held for kept in one.others),
    )


def _state(module: nn.Module, held: Held, name: str, label: str, inside: list[str]) -> State:
    """The state that a module keeps; `inside` are the modules whose parameters are counted."""
    sizes = {"conv": Kept(0), "": Kept(0)}
    for attribute, kept in held.states:
        kind = "conv" if "conv" in attribute else ""
        sizes[kind] = Kept(sizes[kind].numbers + kept.numbers, kept.width)
    own = list(module.parameters())
    if any(_is_in(name, site) for site in inside):
        own = []
    return State(
        recurrent=sizes[""],
        convolution=sizes["conv"],
        products=sum(
            part.weight.numel()
            for part in module.modules()
            if own and isinstance(part, (nn.Linear, nn.Conv1d))
        ),
        parameters=sum(p.numel() for p in own),
        uses=3 if "delta_rule" in " ".join(_names_used(module)) else 2,
        kind=_kind_of_state(module, sizes[""]),
        label=label,
        name=name,
    )


def _names_used(module: nn.Module) -> list[str]:
    """Names of its attributes, and those in the code of its class."""
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in vars(type(module)).values()]
    return [*vars(module), *(name for code in codes if code for name in code.co_names)]


def _kind_of_state(module: nn.Module, recurrent: Kept) -> str:
    if not recurrent.numbers:
        return "short convolution"
    spaces = ("ssm_state_size", "state_size", "d_state", "mamba_d_state")
    return "state space" if find_number(module, spaces) else "linear attention"


def _stating_module(site: Site, model: nn.Module) -> nn.Module:
    """The module that states masks and caches: the transformers module in whose place a layer of
    this library is, if any.
    """
    parent = model.get_submodule(site.name.rpartition(".")[0])
    return parent.kept[""] if isinstance(parent, ModelAttention) else site.module


def _cache_layers(config: Any) -> list[Any]:
    """The layers of transformers' cache for this config, which know their windows and which layer's
    keys they share.
    """
    from transformers import DynamicCache

    try:
        return list(DynamicCache(config=config).layers)
    except Exception:  # the config of an encoder, for instance, lacks what a cache needs
        return []


def _num_calls(num_names: int, config: Any) -> int:
    """How often a pass runs the module: ALBERT's layers share one, others give one several
    names.
    """
    groups = getattr(config, "num_hidden_groups", None)
    if isinstance(groups, int) and groups:
        return int(config.num_hidden_layers // groups)
    return num_names


def _is_masked(site: Site, model: nn.Module) -> bool:
    """Whether the part of the model that holds the module makes a causal mask and no other; CLIP's
    modules have no attribute for it.
    """
    from transformers import PreTrainedModel

    path = site.name
    while path:
        path = path.rpartition(".")[0]
        part = model.get_submodule(path)
        code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
        names = code.co_names if code else ()
        makers = {name for name in names if re.fullmatch(r"create_\w*mask\w*", name)}
        if makers or isinstance(part, PreTrainedModel):
            return makers == {"create_causal_mask"}
    return False


def _shape(site: Site, stated: Any, config: Any, cache: list[Any], masked: bool) -> Shape:
    """The shape of one module; `stated` is the module that states its mask and its cache, `cache`
    holds the layers of its model's cache, and with `masked` the model makes causal masks alone.
    """
    module: Any = site.module
    names = names_of(module)
    roles = {name: projection_role(name, names) for name, _ in module.named_children()}
    projections = {
        name: child
        for name, child in module.named_children()
        if roles[name] in LETTERS and child is not site.out and inner_weight(child) is not None
    }
    q, k, v = (
        next((_sizes(child) for name, child in projections.items() if roles[name] == role), None)
        for role in ("q", "k", "v")
    )
    latent = find_number(module, names.kv_latent_dim)
    head_dim = _key_dim(site, q[1] if q else 0, latent)
    num_kv_heads = k[1] // head_dim if k and k[1] else site.num_kv_heads
    if getattr(module, "multihead", None) is None:
        require_even(site.num_heads, num_kv_heads, f"{site.label}: ")
    arguments = inspect.signature(inspect.unwrap(type(stated).forward)).parameters
    takes_cache = bool(CACHE_ARGUMENTS & arguments.keys())
    flags = [getattr(stated, name, None) for name in ("is_causal", "is_decoder")]
    flags = [flag for flag in flags if isinstance(flag, bool)]
    causal = site.kind == "self" and (masked or any(flags) or (takes_cache and not flags))
    rule = getattr(module, "mask", None)  # of this library's layers
    if isinstance(rule, IntervalMask):
        causal, window = causal and rule.high in (None, 1), _width(rule)
        chunked, has_keys = False, True
    else:
        index = getattr(stated, "layer_idx", site.layer)
        window, chunked, has_keys = _window(
            stated, config, index, cache if causal and takes_cache else []
        )
    first = next(iter(projections.values()), None)
    shape = Shape(
        embed_dim=_sizes(site.out)[1] if first is None else _sizes(first)[0],
        num_heads=site.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=site.head_dim,
        label=site.label,
        name=site.name,
        out_dim=_sizes(site.out)[1],
        source_dim=k[0] if k else None,
        value_source_dim=v[0] if v else None,
        latent_dim=latent,
        rope_dim=(find_number(module, names.rotary_dim) or 0) if latent else 0,
        query_latent_dim=find_number(module, names.q_latent_dim) if latent else None,
        has_keys=has_keys,
        keys_are_values=k is not None and v is None and "v" not in roles.values(),
        topk=_find_topk(module) if causal else None,
        causal=causal,
        window=window if site.kind == "self" else None,
        chunked=chunked,
        cross=site.kind == "cross",
        cached=takes_cache and (causal or site.kind == "cross"),
        expands=bool(latent)
        and not (isinstance(module, LatentAttention) or hasattr(module, "expand_kv")),
        form=_find_form(module) if isinstance(module, LatentAttention) else None,
        norms=_count_norms(module) if latent else 0,
        biases=_biases(site, {name: roles[name] for name in projections}),
    )
    return _with_rest(shape, site, roles)


def _key_dim(site: Site, q_outputs: int, latent: int | None) -> int:
    """The width of a head's queries and keys, E, from the outputs of W_Q."""
    if stated := getattr(site.module, "qk_head_dim", None):
        return int(stated)
    if not q_outputs or q_outputs % site.num_heads:
        return site.head_dim
    width = q_outputs // site.num_heads
    stated = getattr(site.module, "head_dim", site.head_dim)
    if width == 2 * site.head_dim and not latent and stated == site.head_dim:
        return site.head_dim  # half of the outputs are a gate
    return width


def _width(mask: IntervalMask) -> int | None:
    """The window of a mask: the keys of a query, its own included, or as many before as after."""
    if mask.low is None:
        return None
    if mask.high in (None, 1):
        return 1 - mask.low
    return -mask.low if mask.high == 1 - mask.low else None


def _find_form(layer: LatentAttention) -> str:
    """The form that it computes; "auto" where that depends on the numbers of queries and keys."""
    return layer.form if layer.form != "auto" or layer._can_absorb() else "expanded"


def _count_norms(module: nn.Module) -> int:
    """Parameters of the norms of latents."""
    norms = (child for name, child in module.named_children() if "norm" in name)
    return sum(p.numel() for norm in norms for p in norm.parameters())


def _window(
    module: Any, config: Any, index: int | None, cache: list[Any]
) -> tuple[int | None, bool, bool]:
    """The window, whether it is a chunk, and whether the layer projects keys and values itself."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds and index is not None and index < len(kinds) else ""
    shared = bool(getattr(module, "is_kv_shared_layer", False))
    if index is not None and index < len(cache):
        layer = cache[index]
        if "Dummy" not in type(layer).__name__:
            sliding = getattr(layer, "is_sliding", False)
            window = getattr(layer, "sliding_window", None) if sliding else None
            return window, "chunked" in kind, not shared
        shared = True
    window = getattr(config if "sliding" in kind else module, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None, False, not shared


def _with_rest(shape: Shape, site: Site, roles: dict[str, str | None]) -> Shape:
    """The shape with every other parameter of the module, by name, so that the sum is complete."""
    module: Any = site.module
    counts: Counter[str] = Counter()
    products: Counter[str] = Counter()
    seen = set()
    for name, parameter in [*module.named_parameters(), *site.out.named_parameters(prefix="OUT")]:
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        first = name.partition(".")[0]
        holder = site.out if first == "OUT" else module.get_submodule(name.rpartition(".")[0])
        role = roles.get(first) or projection_role(first, names_of(module))
        is_norm = shape.latent_dim is not None and "norm" in first
        inside = first == "OUT" or holder is site.out or role in LETTERS or is_norm
        part = "" if inside else first
        counts[part] += parameter.numel()
        is_matrix = inner_weight(holder) is parameter or (part == "" and holder is module)
        if parameter.ndim >= 2 and is_matrix:
            products[part] += parameter.numel()
    extras = [
        Extra(name, number, products[name], _indexer_pairs(getattr(module, name)))
        for name, number in counts.items()
        if name
    ]
    # packed weights (torch.ao's quantised modules) are no parameters: none is missing
    packed = inspect.ismethod(getattr(site.out, "weight", None))
    missing = 0 if packed else counts[""] - sum(shape.parameters.values())
    if missing:
        queries = shape.num_heads * shape.head_dim
        gated = any("gate" in name for name, role in roles.items() if role in LETTERS)
        gate = gated or missing in (shape.embed_dim * queries, (shape.embed_dim + 1) * queries)
        extras.append(
            Extra("gate" if gate else "other", missing, products[""] - sum(shape.products))
        )
    return replace(shape, extras=tuple(extras))


def _indexer_pairs(part: Any) -> int:
    """Multiply-adds for each pair of query and key in an indexer (DeepSeek-V3.2), which scores all
    keys with small heads and sums over them.
    """
    if "Indexer" not in type(part).__name__:
        return 0
    names = names_of(part)
    heads, width = (find_number(part, kind) or 0 for kind in (names.num_heads, names.head_dim))
    weighted = any("weight" in name for name, _ in part.named_children())  # the sum over heads
    return heads * (width + weighted)


def _find_topk(module: Any) -> int | None:
    """How many keys a query reads, of those that an indexer chooses for it (DeepSeek-V3.2): its own
    or that of an earlier layer.
    """
    holders = (getattr(module, "indexer", None), module, getattr(module, "config", None))
    if not hasattr(module, "indexer"):
        return None
    return next((n for h in holders if (n := find_number(h, ("index_topk",)))), None)


def _biases(site: Site, roles: dict[str, str | None]) -> str:
    """The letters among "qkvo" of the projections that have a bias."""
    module: Any = site.module
    letters = {
        letter
        for name, role in roles.items()
        if _bias_of(getattr(module, name)) is not None
        for letter in LETTERS[role or ""]
    }
    letters |= {
        letter
        for letter in "qkv"
        if isinstance(getattr(module, f"{letter}_bias", None), nn.Parameter)
    }
    if getattr(module, "in_proj_bias", None) is not None:
        letters |= set("qkv")
    if _bias_of(site.out) is not None:
        letters.add("o")
    return "".join(letter for letter in "qkvo" if letter in letters)


def _bias_of(module: nn.Module) -> Any:
    bias: Any = getattr(module, "bias", None)
    return bias() if inspect.ismethod(bias) else bias  # of torch.ao's modules


def _sizes(module: nn.Module) -> tuple[int, int]:
    """The number of inputs and of outputs of a projection."""
    weight, inputs = inner_weight(module), in_features(module)
    return inputs, weight.numel() // inputs if weight is not None else 0
