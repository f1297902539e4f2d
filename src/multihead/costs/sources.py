"""From a model, a config or a file to the shapes of its attention. Nothing is loaded: models are
built without memory.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..models.checkpoint_files import locate_model, named_class, quiet
from ..models.foreign import GROUPS, Kind, kind_of
from ..models.foreign import HEADS as HEADS_OF
from ..models.gguf import read_gguf_once
from ..models.pruned import pruned_class
from ..models.site import (
    NUMBER_NAMES,
    WIDTH_NAMES,
    Site,
    _labels,
    _out_name,
    _path,
    _width,
    in_features,
    is_cross,
    uses_interface,
)
from .shape import Extra, Shape, require_even

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Names of what makes queries, keys and values; whatever else lies in the module stands beside the
# projections.
CORE = re.compile(
    r"([qkv]|qkv|kv|q_a|q_b|kv_a|kv_b|in)(_proj|_lin|_attn)?(_with_mqa|_weight|_bias)?|[wW](q|k|v|qkv)|W_pack|"
    r"to_(q|k|v|kv|qkv)|(query|key|value)(_proj|_key_value|_projection)?|linear_[qkv]|c_attn|query_key_value|att_proj|q_gate_proj|"
    r"(q|k|v|qkv)_proj_weight|(q|kv)_a_layernorm"
)
QUERY = re.compile(r"(q|wq|query|to_q|linear_q|q_attn)(_proj|_lin|_b_proj)?", re.IGNORECASE)
KEY = re.compile(r"(k|wk|key|to_k|linear_k)(_proj|_lin)?", re.IGNORECASE)
NAMED, OTHERWISE = (
    re.compile("(Attention|Attn)\\w*$"),
    re.compile("(Mixer|MambaLayer|DeltaNet|ShortConv|RecurrentBlock)$"),
)
CACHES = {"cache", "past_key_values", "past_key_value", "layer_past"}
WIDTHS, HEADS = (
    re.compile("hidden_size|d_model|n_embd|dim|width|embed"),
    re.compile("heads?$|heads_per|n_head"),
)
Source = nn.Module | Mapping[str, Any] | str | Path | None


def open_source(model: Any) -> tuple[str, nn.Module, Any]:
    """What to call it, the model, and its config (None for a module of one's own)."""
    if isinstance(model, nn.Module):
        return type(model).__name__, model, getattr(model, "config", None)
    if isinstance(model, (str, Path)) or model is None:
        name, config = _config_at(model)
    elif isinstance(model, Mapping):
        name, config = str(model.get("model_type", "config")), _config_of("the config", model)
    elif hasattr(model, "model_type") and hasattr(model, "to_dict"):
        name, config = model.model_type, model
    else:
        raise TypeError(
            f"model={type(model).__name__}: expected a folder, a config.json, a GGUF file, a hub"
            " name, a config or a model"
        )
    return name, _build(name, config), config


def shapes_of(model: nn.Module, config: Any) -> tuple[list[Shape], list[str]]:
    """Every attention module's shape, and what isn't counted, in words."""
    sites, notes = attention_sites(model)
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    kept: dict[int, tuple[Any, list[Any]]] = {}
    shapes = []
    for site in sites:
        own = getattr(site.module, "config", config)
        if id(own) not in kept:
            kept[id(own)] = own, _cache_layers(own)
        shape = _shape(site, own, kept[id(own)][1], masked=_is_masked(site, model))
        shapes.append(
            replace(
                shape, calls=_calls(names[id(site.module)], own), encoder=_is_encoder(site, config)
            )
        )
    return shapes, notes


def attention_sites(model: nn.Module) -> tuple[list[Site], list[str]]:
    """All attention modules: those that can be read, and others that are called attention and hold
    their projections.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    sure = {
        name
        for name, module in model.named_modules()
        if uses_interface(module) or isinstance(kind_of(module), Kind)
    }
    called = [
        name
        for name, module in model.named_modules()
        if name not in sure and NAMED.search(type(module).__name__)
    ]
    others = [
        name
        for name in called
        if not any(name != n and f"{n}.".startswith(f"{name}.") for n in (*sure, *called))
        and not any(f"{name}.".startswith(f"{n}.") for n in sure)
    ]
    found, notes = {}, []
    for name in [name for name, _ in model.named_modules() if name in sure or name in others]:
        module = modules[name]
        try:
            out_name = _out_name(name, module, modules)
            width = (
                _width(name, module, modules[out_name])
                if name in sure
                else _other_width(module, modules[out_name])
            )
            if _weight(modules[out_name]) is None:
                raise MultiheadError("what is called its output projection isn't one")
            found[name] = out_name, width
        except ValueError:
            if next(module.parameters(), None) is not None:
                notes.append(
                    f"not counted: {type(module).__name__}, whose projections and heads aren't"
                    " known by their names"
                )
    paths = [_path(name, modules) for name in found]
    sites = []
    for (name, (out_name, width)), path, label in zip(
        found.items(), paths, _labels(paths), strict=True
    ):
        layer = re.search(r"L(\d+)", label)
        sites.append(
            Site(
                name,
                label,
                int(layer[1]) if layer else None,
                "cross" if is_cross(path, modules[name]) else "self",
                modules[name],
                modules[out_name],
                out_name,
                width,
            )
        )
    notes += [
        f"not counted: {type(module).__name__}, which mixes tokens otherwise"
        for name, module in model.named_modules()
        if OTHERWISE.search(type(module).__name__)
        and not any(f"{n}.".startswith(f"{name}.") for n in found)
    ]
    notes = list(dict.fromkeys(notes))
    if not sites:
        raise MultiheadError(
            "; ".join([f"{type(model).__name__} has no attention that is known here", *notes])
        )
    return sites, notes


def _other_width(module: nn.Module, out: nn.Module) -> int:
    """The width of a head where nothing but attributes tells it, and the projection must agree."""
    for names, heads in ((WIDTH_NAMES, False), ((*NUMBER_NAMES, *HEADS_OF), True)):
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, int) and value and in_features(out) % value == 0:
                return in_features(out) // value if heads else value
    raise MultiheadError("neither the width of a head nor their number is known")


def positions(config: Any) -> tuple[int | None, int | None]:
    """The most tokens of a text that the config speaks of, and of an encoder's source."""
    if config is None:
        return None, None
    text = config.get_text_config()
    own = next(
        (
            n
            for name in ("max_position_embeddings", "max_target_positions", "n_positions")
            if isinstance(n := getattr(text, name, None), int) and n > 0
        ),
        None,
    )
    source = getattr(config, "max_source_positions", None)
    return own, source if isinstance(source, int) else None


def _config_at(model: str | Path | None) -> tuple[str, Any]:
    """The config of a file, folder or hub name; weights aren't looked at."""
    from transformers import AutoConfig

    name, path = locate_model(model)
    if path is None:  # only the hub, or its cache, knows it
        try:
            return name, AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise MultiheadError(
                f"model={name!r}: there is no such file or folder here, and its config isn't in the"
                " local cache nor on the hub. Expected a folder with config.json, that file"
                f" itself, or a GGUF file ({str(error).splitlines()[0]})"
            ) from error
    if path.suffix == ".gguf":
        try:
            with quiet(hide_stderr=True), read_gguf_once():
                return name, AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as error:  # what a broken file raises depends on where it breaks off
            raise MultiheadError(
                f"model={str(path)!r}: transformers could not read the GGUF file's settings"
                f" ({_brief(error)}); it may need: pip install 'multihead[gguf]'"
            ) from error
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(
            f"model={str(path)!r}: the folder has no config.json; give the folder of a transformers"
            " checkpoint, a config.json, or a GGUF file"
        )
    if file.suffix != ".json":
        raise MultiheadError(
            f"model={str(path)!r}: expected a folder with config.json, that file itself, or a GGUF"
            " file; a cost needs no weights"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MultiheadError(f"model={str(file)!r}: is not valid JSON ({error})") from error
    return (
        path.resolve().parent.name if path.is_file() and path.name == "config.json" else name,
        _config_of(str(file), content),
    )


def _config_of(where: str, content: Any) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    if not isinstance(content, Mapping):
        raise MultiheadError(
            f"{where}: holds a {type(content).__name__}, expected named entries {{...}}"
        )
    kind = content.get("model_type")
    if kind not in CONFIG_MAPPING:
        has = f"model_type={kind!r}, which transformers doesn't know" if kind else "no model_type"
        raise MultiheadError(
            f"{where}: has {has}, so which attention it means can't be told; give its numbers"
            " yourself: --d-model, --heads, --kv-heads, --head-dim, --layers (d_model=, heads=,"
            " ... in Python)"
        )
    for pattern, what in (
        (WIDTHS, "width (hidden_size, d_model, n_embd, ...)"),
        (HEADS, "number of heads (num_attention_heads, n_head, ...)"),
    ):
        if not any(pattern.search(str(key)) for key in _keys(content)):
            raise MultiheadError(
                f"{where}: doesn't say the model's {what}, and {kind}'s default needn't be meant;"
                " write it there, or give --d-model, --heads and so on instead of a config"
            )
    try:
        return AutoConfig.for_model(**content)
    except Exception as error:  # each config class checks in its own way
        raise MultiheadError(
            f"{where}: transformers can't make a config of it: {_brief(error)}"
        ) from error


def _keys(content: Mapping[Any, Any]) -> list[Any]:
    found = []
    for key, value in content.items():
        found += _keys(value) if isinstance(value, Mapping) else [key] if value is not None else []
    return found


def _build(name: str, config: Any) -> nn.Module:
    """The model on the meta device, where parameters have shapes and no memory."""
    import transformers

    kind = named_class({"architectures": getattr(config, "architectures", None)})
    kind = pruned_class(kind, vars(config)) or kind
    try:
        with quiet(hide_stderr=False), torch.device("meta"):
            return (
                kind._from_config(config) if kind else transformers.AutoModel.from_config(config)
            ).eval()
    except Exception as error:  # whatever a model's own code trips over
        raise MultiheadError(
            f"model={name!r}: transformers {transformers.__version__} can't make a model of its"
            f" config: {_brief(error)}. Check its sizes: heads must divide the width, key/value"
            " heads the heads"
        ) from error


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _cache_layers(config: Any) -> list[Any]:
    """The layers of transformers' own cache for this config, which know their windows and whom they
    share with.
    """
    from transformers import DynamicCache

    try:
        return list(DynamicCache(config=config).layers)
    except Exception:  # an encoder's config, say, with nothing that a cache could go by
        return []


def _calls(names: int, config: Any) -> int:
    """How often a pass runs the module: ALBERT's layers share one, others give one several
    names.
    """
    groups = getattr(config, "num_hidden_groups", None)
    return int(config.num_hidden_layers // groups) if isinstance(groups, int) and groups else names


def _is_encoder(site: Site, config: Any) -> bool:
    parts = site.name.split(".")
    return (
        bool(getattr(config, "is_encoder_decoder", False))
        and "encoder" in parts
        and "decoder" not in parts
    )


def _is_masked(site: Site, model: nn.Module) -> bool:
    """Whether the part of the model that holds the module makes a causal mask and no other: CLIP's
    modules don't say it.
    """
    from transformers import PreTrainedModel

    path = site.name
    while path:
        path = path.rpartition(".")[0]
        part = model.get_submodule(path)
        code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
        makers = (
            {name for name in code.co_names if re.fullmatch(r"create_\w*mask\w*", name)}
            if code
            else set()
        )
        if makers or isinstance(part, PreTrainedModel):
            return makers == {"create_causal_mask"}
    return False


def _shape(site: Site, config: Any, layers: list[Any], *, masked: bool) -> Shape:
    m: Any = site.module
    children = {name: child for name, child in m.named_children() if child is not site.out}
    core = {
        name: child
        for name, child in children.items()
        if CORE.fullmatch(name) and _weight(child) is not None
    }
    heads, value_dim = site.num_heads, site.head_dim
    width = next((_sides(child)[0] for child in core.values()), 0)
    wide = next((_sides(child)[1] for name, child in core.items() if QUERY.fullmatch(name)), 0)
    latent = getattr(m, "kv_lora_rank", None)
    head_dim = getattr(m, "qk_head_dim", None) or (
        wide // heads if wide and wide % heads == 0 else value_dim
    )
    if head_dim == 2 * value_dim and not latent and getattr(m, "head_dim", value_dim) == value_dim:
        head_dim = value_dim  # half of it is a gate
    shared = getattr(m, "num_key_value_groups", None)
    key = next((_sides(child)[1] for name, child in core.items() if KEY.fullmatch(name)), 0)
    if key:
        kv_heads = key // head_dim
    elif isinstance(shared, int) and shared:
        kv_heads = heads // shared
    else:
        kv_heads = next(
            (n for name in GROUPS if isinstance(n := getattr(m, name, None), int)), heads
        )
    if kv_heads and getattr(m, "multihead", None) is None:
        require_even(heads, kv_heads, f"{site.label}: ")
    takes_cache = bool(
        CACHES & inspect.signature(inspect.unwrap(type(m).forward)).parameters.keys()
    )
    said = [
        value
        for name in ("is_causal", "is_decoder")
        if isinstance(value := getattr(m, name, None), bool)
    ]
    causal = site.kind == "self" and (masked or any(said) or (takes_cache and not said))
    index = getattr(m, "layer_idx", site.layer)
    window, chunked, own_keys = _window(m, config, index, layers if causal and takes_cache else [])
    shape = Shape(
        width=width or _sides(site.out)[1],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        label=site.label,
        name=site.name,
        out_width=_sides(site.out)[1],
        source_width=next(
            (_sides(child)[0] for name, child in core.items() if KEY.fullmatch(name)), None
        ),
        latent=latent,
        rope=getattr(m, "qk_rope_head_dim", 0) if latent else 0,
        query_latent=getattr(m, "q_lora_rank", None) if latent else None,
        own_keys=own_keys,
        causal=causal,
        window=window if site.kind == "self" else None,
        chunked=chunked,
        cross=site.kind == "cross",
        cached=takes_cache and (causal or site.kind == "cross"),
        expands=bool(latent) and not hasattr(m, "expand_kv"),
    )
    return _with_rest(replace(shape, biases=_biases(site, m, core)), site, m)


def _window(
    m: Any, config: Any, index: int | None, layers: list[Any]
) -> tuple[int | None, bool, bool]:
    """The window, whether it is a chunk, and whether the layer has keys of its own."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds and index is not None and index < len(kinds) else ""
    shared = bool(getattr(m, "is_kv_shared_layer", False))
    if layers and index is not None and index < len(layers):
        layer = layers[index]
        if "Dummy" not in type(layer).__name__:
            window = (
                getattr(layer, "sliding_window", None)
                if getattr(layer, "is_sliding", False)
                else None
            )
            return window, "chunked" in kind, not shared
        shared = True
    own = getattr(config if "sliding" in kind else m, "sliding_window", None)
    return own if isinstance(own, int) and own > 0 else None, False, not shared


def _with_rest(shape: Shape, site: Site, m: Any) -> Shape:
    """With all that lies in the module beside its projections, by name, so that nothing is left out
    of the sum.
    """
    counted: Counter[str] = Counter()
    products: Counter[str] = Counter()
    seen = set()
    for name, parameter in [*m.named_parameters(), *site.out.named_parameters(prefix="OUT")]:
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        first = name.partition(".")[0]
        holder = site.out if first == "OUT" else m.get_submodule(name.rpartition(".")[0])
        inside = first == "OUT" or holder is site.out or CORE.fullmatch(first) is not None
        part = "" if inside else first
        counted[part] += parameter.numel()
        if parameter.ndim >= 2 and (_weight(holder) is parameter or (part == "" and holder is m)):
            products[part] += parameter.numel()
    extras = [
        Extra(name, number, products[name], _chooses(getattr(m, name)))
        for name, number in counted.items()
        if name
    ]
    missing = counted[""] - sum(shape.parameters.values())
    if missing:
        gate = missing in (
            shape.width * shape.heads * shape.head_dim,
            (shape.width + 1) * shape.heads * shape.head_dim,
        ) or any("gate" in name for name, _ in m.named_children() if CORE.fullmatch(name))
        extras.append(
            Extra("gate" if gate else "other", missing, products[""] - sum(shape.products))
        )
    return replace(shape, extras=tuple(extras))


def _chooses(part: Any) -> int:
    """Multiply-adds for each pair in an indexer (DeepSeek-V3.2), which scores all keys with small
    heads and sums the heads.
    """
    heads, wide = (
        next((n for name in names if isinstance(n := getattr(part, name, None), int)), 0)
        for names in (("n_heads", "num_heads"), ("head_dim",))
    )
    return heads * (wide + 1) if "Indexer" in type(part).__name__ else 0


def _biases(site: Site, m: Any, core: dict[str, Any]) -> str:
    found = {
        letter
        for name, child in core.items()
        if getattr(child, "bias", None) is not None
        for letter in (
            "q"
            if QUERY.fullmatch(name) or name == "q_a_proj"
            else (
                "k"
                if KEY.fullmatch(name) or name.startswith("kv_a")
                else "v"
                if re.match("v|to_v|wv|linear_v", name, re.IGNORECASE)
                else "qkv"
            )
        )
    }
    found |= {
        letter for letter in "qkv" if isinstance(getattr(m, f"{letter}_bias", None), nn.Parameter)
    }
    if getattr(m, "in_proj_bias", None) is not None:
        found |= set("qkv")
    if getattr(site.out, "bias", None) is not None:
        found.add("o")
    return "".join(letter for letter in "qkvo" if letter in found)


def _weight(module: nn.Module) -> Tensor | None:
    """The matrix of a Linear or its kin, or of what wraps one; None for a norm, an embedding, a
    convolution.
    """
    for holder in (module, getattr(module, "base_layer", None), getattr(module, "linear", None)):
        weight = getattr(holder, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(holder, nn.Embedding):
            try:
                in_features(holder)  # type: ignore[arg-type]
            except ValueError:
                continue
            return weight
    return None


def _sides(module: nn.Module) -> tuple[int, int]:
    """What a projection takes and what it gives."""
    weight, wide = _weight(module), in_features(module)
    return wide, weight.numel() // wide if weight is not None else 0
