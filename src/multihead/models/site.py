"""`Site`: one attention module of a model, with the slices of W_Q, W_K, W_V and W_O that belong to
each of its heads. Reading, pruning and costs are written once against sites.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import MultiheadError, did_you_mean
from .foreign import Kind, kind_of
from .head_layout import HeadLayout
from .introspect import inner_model
from .labels import is_cross, label_paths, stack_of
from .names import find_number, names_of
from .slices import SiteSlices, find_slices, in_features, inner_weight
from .transformers import NAME
from .weights import read_projection

ATTENTION = re.compile(r"(Attention|Attn)\w*$")
# Classes that mix tokens in another way, in the other layers of hybrid models.
MIXER = re.compile(r"(Mixer|MambaLayer|DeltaNet|ShortConv|RecurrentBlock)$")


@dataclass(frozen=True)
class Site:
    """One attention module. Head h enters its output projection by the inputs `h * head_dim` to
    `(h + 1) * head_dim`.

    >>> import multihead
    >>> from multihead.models import find_sites
    >>> model, _ = multihead.load_builtin()
    >>> site = find_sites(model)[1]
    >>> site.label, site.kind, site.num_heads, site.num_kv_heads, site.head_dim
    ('L1', 'self', 8, 8, 24)
    >>> site.head_label(3), list(site.slices().q.weight().shape)
    ('L1.H3', [8, 24, 192])
    """

    name: str  # module path, "model.layers.12.self_attn"
    label: str  # "L12", "decoder.L0.cross": short, unique in the model
    layer: int | None
    kind: str  # "self" or "cross"
    stack: str  # "encoder", "decoder", a tower ("vision_model"), or ""
    module: nn.Module
    out: nn.Module  # the output projection W_O
    out_name: str  # module path of `out`
    head_dim: int  # width of the values of a head, Ev (of MLA: v_head_dim)

    @property
    def num_heads(self) -> int:
        """Query heads, H."""
        return in_features(self.out) // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads, G: from the projections, else (quantised, adapted) from attributes."""
        try:
            return self.slices().num_kv_heads
        except MultiheadError:
            names = names_of(self.module)
        if (size := find_number(self.module, names.group_size)) is not None:
            return self.num_heads // size
        return find_number(self.module, names.num_kv_heads) or self.num_heads

    def slices(self, layout: str | None = None) -> SiteSlices:
        """The slices of W_Q, W_K, W_V and W_O that belong to each head; see `find_slices`."""
        return find_slices(self, layout)

    def head_label(self, head: int) -> str:
        """The label of a head, such as "L12.H3", by its number in the model before pruning."""
        layout = getattr(self.module, NAME, None)
        return f"{self.label}.H{head if layout is None else layout.original_heads[head]}"

    def out_weight(self) -> tuple[Tensor, Tensor]:
        """W_O `[H * Ev, D]` and its bias `[D]`: those of a Linear, else what the projection does to
        unit vectors and to zero, which covers transposed, adapted (LoRA), quantised and offloaded
        ones.
        """
        found = read_projection(self.out)
        return found.weight, found.bias


def find_sites(model: nn.Module) -> list[Site]:
    """All attention modules of a model that can be read, in the order of its modules.

    Raises:
        MultiheadError: there are none, or the attribute names of one aren't known (see
            `multihead.models.register_family`). The message names the class.

    >>> find_sites(nn.TransformerEncoderLayer(64, 4))[0].name
    'self_attn'
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    parts = {
        name: _find_parts(name, module, modules)
        for name, module in model.named_modules()
        if uses_interface(module) or _why_not(name, module, modules) == ""
    }
    if not parts:
        raise MultiheadError(_explain_none(model))
    return _make_sites(model, parts, modules)


def find_attention(model: nn.Module, states: Collection[str] = ()) -> tuple[list[Site], list[str]]:
    """All attention modules, also those that can't be read but hold their projections, and notes on
    what is left out.

    Args:
        model: any model.
        states: paths of the modules that are known to keep a state of constant size, whatever they
            are called: none of them is attention.

    Raises:
        MultiheadError: there are none, and no states either.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    readable = {
        name
        for name, module in model.named_modules()
        if uses_interface(module) or isinstance(kind_of(module), Kind)
    }
    named = [
        name
        for name, module in model.named_modules()
        if name not in readable
        and not any(f"{name}.".startswith(f"{state}.") for state in states)
        and ATTENTION.search(type(module).__name__)
    ]
    # The innermost of nested classes called attention, and nothing inside a readable module.
    others = {
        name
        for name in named
        if not any(name != n and f"{n}.".startswith(f"{name}.") for n in (*readable, *named))
        and not any(f"{name}.".startswith(f"{n}.") for n in readable)
    }
    parts, notes = {}, []
    for name, module in model.named_modules():
        if name not in readable and name not in others:
            continue
        try:
            out_name, head_dim = _find_parts(name, module, modules)
            if inner_weight(modules[out_name]) is None:
                raise MultiheadError(f"{out_name} isn't a projection")
            parts[name] = out_name, head_dim
        except MultiheadError:
            if next(module.parameters(), None) is not None:
                notes.append(
                    f"not counted: {type(module).__name__}, whose projections and heads aren't"
                    " known by their names"
                )
    notes += [
        f"not counted: {type(module).__name__}, which mixes tokens without attention"
        for name, module in model.named_modules()
        if MIXER.search(type(module).__name__)
        and not any(f"{n}.".startswith(f"{name}.") for n in (*parts, *states))
    ]
    notes = list(dict.fromkeys(notes))
    if not parts and not states:
        none = f"{type(model).__name__} has no attention that is known here"
        raise MultiheadError("; ".join([none, *notes]))
    return _make_sites(model, parts, modules), notes


def select_heads(sites: list[Site], labels: str | Iterable[str]) -> list[tuple[Site, int]]:
    """Find heads by labels such as "L12.H3": pairs of a site and the number of the head in it.

    Raises:
        MultiheadError: a label that doesn't exist, with the nearest one.
    """
    known = {site.head_label(h): (site, h) for site in sites for h in range(site.num_heads)}
    chosen = []
    for label in [labels] if isinstance(labels, str) else labels:
        if label not in known:
            first, last = next(iter(known)), list(known)[-1]
            raise MultiheadError(
                f"head {label!r} doesn't exist; {did_you_mean(label, known)}this model's heads are"
                f" {first} to {last}"
            )
        chosen.append(known[label])
    return chosen


def uses_interface(module: nn.Module) -> bool:
    """Whether the module's forward calls attention through transformers'
    ALL_ATTENTION_FUNCTIONS.
    """
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


# ---- the parts of a site


def _make_sites(
    model: nn.Module, parts: dict[str, tuple[str, int]], modules: dict[str, nn.Module]
) -> list[Site]:
    """Sites from the path and head width that `_find_parts` gives for each attention module."""
    # Modules that lost all their heads keep their labels, so that the others keep theirs.
    labelled = [
        name
        for name, module in model.named_modules()
        if name in parts or isinstance(getattr(module, NAME, None), HeadLayout)
    ]
    inside = _find_inside(model, labelled)
    labels = label_paths([_path(name, modules).removeprefix(inside) for name in labelled])
    sites = []
    for name, label in zip(labelled, labels, strict=True):
        if name not in parts:
            continue
        path, module = _path(name, modules).removeprefix(inside), modules[name]
        out_name, head_dim = parts[name]
        layer = re.search(r"L(\d+)", label)
        sites.append(
            Site(
                name=name,
                label=label,
                layer=int(layer[1]) if layer else None,
                kind="cross" if is_cross(path, module) else "self",
                stack=stack_of(path),
                module=module,
                out=modules[out_name],
                out_name=out_name,
                head_dim=head_dim,
            )
        )
    return sites


def _find_inside(model: nn.Module, names: list[str]) -> str:
    """The path, with a dot, of the one transformers model in wrappers that holds all these sites;
    "" without one. Labels don't depend on the wrapper's attributes.
    """
    inner = inner_model(model)
    path = next(f"{name}." for name, module in model.named_modules() if module is inner)
    return path if path != "." and all(name.startswith(path) for name in names) else ""


def _find_parts(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> tuple[str, int]:
    """The path of an attention module's output projection, and its head width."""
    out_name = _find_out(name, module, modules)
    try:
        return out_name, _find_head_dim(module, modules[out_name])
    except MultiheadError as error:
        raise MultiheadError(
            f"{name or 'the model'} ({type(module).__name__}) can't be read: {error}"
        ) from None


def _find_out(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> str:
    """The path of the output projection: a child of the module, or (BERT) of its parent."""
    names, parent = names_of(module), _parent(name)
    paths = [f"{name}.{n}" for n in names.out] + [f"{parent}.{n}" for n in names.parent_out]
    for path in (path.lstrip(".") for path in paths):
        if path in modules:
            out = modules[path]
            # diffusers: to_out = [Linear, Dropout]
            return f"{path}.0" if isinstance(out, nn.Sequential) and len(out) else path
    kind = type(module).__name__
    raise MultiheadError(
        f"{name or 'the model'} ({kind}) can't be read: its output projection isn't among"
        f" {', '.join(names.out)}; rename it, or run"
        f" multihead.models.register_family({kind!r}, out='its name') first"
    )


def _find_head_dim(module: nn.Module, out: nn.Module) -> int:
    """The width of a head's values, from an attribute for it or for the number of heads."""
    names, total, kind = names_of(module), in_features(out), type(module).__name__
    count = find_number(module, names.num_heads)
    if not uses_interface(module) and isinstance(kind_of(module), Kind):
        if count is None:
            raise MultiheadError(
                f"the number of its heads isn't among {', '.join(names.num_heads)}; set such an"
                f" attribute, or run multihead.models.register_family({kind!r},"
                " num_heads='its name') first"
            )
        if total % count:
            raise MultiheadError(
                f"its output projection takes {total}, which its {count} heads don't divide"
            )
        return total // count
    widths = (*names.value_dim, *names.head_dim)
    width = find_number(module, widths)
    if width is not None and (total % width == 0 or total // width == count):
        return width
    if count is not None and total % count == 0:
        return total // count
    raise MultiheadError(
        f"no attribute for the width of its heads ({', '.join(widths)}) or their number"
        f" ({', '.join(names.num_heads)}) divides the {total} inputs of its output projection; run"
        f" multihead.models.register_family({kind!r}, head_dim='its name') first"
    )


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _path(name: str, modules: dict[str, nn.Module]) -> str:
    """The module path, with nn.TransformerDecoderLayer's `multihead_attn` called cross_attn."""
    decoder = isinstance(modules.get(_parent(name)), nn.TransformerDecoderLayer)
    cross = decoder and name.endswith("multihead_attn")
    return f"{_parent(name)}.cross_attn".lstrip(".") if cross else name


# ---- why attention can't be read


def list_unreadable(model: nn.Module, sites: Iterable[Site]) -> list[str]:
    """Classes that look like attention, but neither hold a site nor lie in one, and why."""
    names = [site.name for site in sites]
    reasons = _list_reasons(model)
    inside = [
        f"{_parent(name)}."
        for name in names
        if "Attention" in type(model.get_submodule(_parent(name))).__name__
    ]
    unreached = {
        type(module).__name__
        for name, module in model.named_modules()
        if type(module).__name__ not in reasons
        and (ATTENTION.search(type(module).__name__) or MIXER.search(type(module).__name__))
        and not any(f"{s}.".startswith(f"{name}.") or name.startswith(f"{s}.") for s in names)
        and not any(name.startswith(prefix) for prefix in inside)
        and next(module.parameters(), None) is not None
    }
    why = (
        "doesn't go through transformers' attention interface, nor through torch's"
        " scaled_dot_product_attention"
    )
    return sorted(
        [f"{name} {why}" for name in unreached]
        + [f"{name}: {reason}" for name, reason in reasons.items()]
    )


def _why_not(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    """Why a module outside of transformers can't be read: "" where it can, None where it holds no
    attention that is known.
    """
    kind = kind_of(module)
    if not isinstance(kind, Kind):
        return kind
    try:
        _find_parts(name, module, modules)
    except MultiheadError as error:
        return str(error)
    return ""


def _list_reasons(model: nn.Module) -> dict[str, str]:
    """Classes whose attention is known but can't be read, and why."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        type(module).__name__: reason
        for name, module in model.named_modules()
        if not uses_interface(module) and (reason := _why_not(name, module, modules))
    }


def _explain_none(model: nn.Module) -> str:
    classes = sorted(
        {type(m).__name__ for m in model.modules() if re.search("Attention|Attn", type(m).__name__)}
    )
    what = f"its attention ({', '.join(classes)})" if classes else "it"
    known = "".join(f" {name}: {reason}." for name, reason in _list_reasons(model).items())
    return (
        f"{type(model).__name__} can't be read: {what} doesn't go through transformers' attention"
        " interface, and isn't one of torch's, timm's or multihead's layers, so its weights can't"
        f" be reached.{known} Models that do (Llama, Qwen, Gemma, GPT-2, BERT, ViT, Whisper, T5,"
        " ...) can be read, and so can user-defined modules that call torch's"
        " scaled_dot_product_attention: docs/reading.md lists them"
    )
