"""A site is where heads live: one attention module of any model, and how to reach what belongs to
each of its heads.

Reading, pruning, cost and check are written once against sites. What differs between families of
models stands in the
table below: what they call the output projection and the width of a head, and what stands between
    the two.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from .foreign import Kind, between, heads_of, kind_of
from .head_layout import HeadLayout
from .slices import SiteSlices, find_slices
from .transformers import NAME

# The output projection W_O: an attribute of the attention module, or (BERT and its kin) of its
# parent.
OUT_NAMES = (
    "o_proj",
    "out_proj",
    "c_proj",
    "proj",
    "o",
    "projection",
    "dense",
    "Wo",
    "to_out",
    "out_lin",
    "linear_out",
    "projection_layer",
    "output_projection",
    "output",
    "wo",
    "w_o",
    "W_O",
    "out",
    "fc_out",
)
PARENT_OUT_NAMES = ("output.dense", "dense")
WIDTH_NAMES = ("v_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
NUMBER_NAMES = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "heads",
)  # of heads, for want of a width
# Modules in which a gate or norm of each number by itself stands between the heads and W_O, as a
# reading found out: there u
# is measured at the projection's real input, and contributions are empty.
elementwise: WeakSet[nn.Module] = WeakSet()
# Attention, or what stands in its place in a hybrid's other layers.
UNSEEN = re.compile(r"(Attention|Attn)\w*$|(Mixer|MambaLayer|DeltaNet|ShortConv|RecurrentBlock)$")
CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_decoder", re.IGNORECASE)


@dataclass(frozen=True)
class Site:
    """One attention module. `out` is its output projection W_O, which head h enters by columns
    h*width..(h+1)*width.
    """

    name: str  # module path, "model.layers.12.self_attn"
    label: str  # "L12", "decoder.L0.cross": short, unique in the model
    layer: int | None
    kind: str  # "self" or "cross"
    module: nn.Module
    out: nn.Module
    out_name: str
    head_dim: int  # width of the values of a head, Ev (of MLA: v_head_dim)

    @cached_property
    def num_heads(self) -> int:
        return in_features(self.out) // self.head_dim

    @property
    def elementwise(self) -> bool:
        return self.module in elementwise or between(self.module)

    def slices(self, layout: str | None = None) -> SiteSlices:
        """The slices of W_Q, W_K, W_V and W_O that belong to each head; see `find_slices`."""
        return find_slices(self, layout)

    def head_label(self, index: int) -> str:
        """What a head is called: by its number in the model as it was before any head was
        pruned.
        """
        layout = getattr(self.module, NAME, None)
        return f"{self.label}.H{index if layout is None else layout.original_heads[index]}"

    @torch.no_grad()
    def out_weight(self) -> tuple[Tensor, Tensor]:
        """W_O `[H*Ev, D]` and the bias `[D]`, by calling the projection on unit vectors and on
        zero.

        So transposed, adapted (LoRA) and quantised projections are covered; a plain Linear is read
        off directly.
        """
        out = self.out
        if type(out) is nn.Linear:
            weight = out.weight.T
            return weight, weight.new_zeros(weight.shape[1]) if out.bias is None else out.bias
        some = next(out.parameters())
        dtype = some.dtype if some.is_floating_point() else torch.float32
        forward = type(
            out
        ).forward  # not __call__: somebody's hooks would take the unit vectors for a text
        bias = forward(out, torch.zeros(1, 1, in_features(out), dtype=dtype, device=some.device))[0]
        unit = torch.eye(in_features(out), dtype=dtype, device=some.device)[None]
        return forward(out, unit)[0] - bias, bias[0]


def in_features(module: nn.Module) -> int:
    """The width that a projection takes, for Linear and its kin, what wraps one, and GPT-2's
    transposed Conv1D.
    """
    for holder in (module, getattr(module, "base_layer", None), getattr(module, "linear", None)):
        if isinstance(value := getattr(holder, "in_features", None), int):
            return value
        if holder is not None and type(holder).__name__ == "Conv1D":
            return int(holder.weight.shape[0])  # type: ignore[index]
    raise MultiheadError(
        f"the output projection is a {type(module).__name__}, which doesn't say its input width, so"
        " it can't be taken apart by heads; expected a Linear or a module with in_features"
    )


def uses_interface(module: nn.Module) -> bool:
    """Whether the module's forward calls attention through transformers'
    ALL_ATTENTION_FUNCTIONS.
    """
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def find_sites(model: nn.Module) -> list[Site]:
    """All sites of a model, in the order of its modules.

    Raises `ValueError` naming the class where attention goes neither through transformers'
    attention interface nor through what the table in modules.py knows, or where a site's output
    projection or head width isn't known to the table of families.
    """
    modules = dict(
        model.named_modules(remove_duplicate=False)
    )  # a projection may have a second name elsewhere
    found = [
        (name, module)
        for name, module in model.named_modules()
        if uses_interface(module) or _reason(name, module, modules) == ""
    ]
    if not found:
        raise MultiheadError(_refusal(model))
    held = {name for name, _ in found}
    cut = [
        name
        for name, part in model.named_modules()
        if name in held or isinstance(getattr(part, NAME, None), HeadLayout)
    ]
    labels = dict(
        zip(cut, _labels([_path(name, modules) for name in cut]), strict=True)
    )  # those whose heads all went count, too
    sites = []
    for name, module in found:
        path, label = _path(name, modules), labels[name]
        out_name = _out_name(name, module, modules)
        number = re.search(r"L(\d+)", label)
        try:
            in_features(modules[out_name])
        except ValueError as error:
            raise MultiheadError(
                f"{name} ({type(module).__name__}) can't be read: {error}"
            ) from None
        sites.append(
            Site(
                name,
                label,
                int(number[1]) if number else None,
                "cross" if is_cross(path, module) else "self",
                module,
                modules[out_name],
                out_name,
                _width(name, module, modules[out_name]),
            )
        )
    return sites


def _reason(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    """Why a module that isn't transformers' can't be read: "" where it can, None where it holds no
    attention that is known.
    """
    kind = kind_of(module)
    if not isinstance(kind, Kind):
        return kind
    try:
        _width(name, module, modules[_out_name(name, module, modules)])
    except ValueError as error:
        return str(error)
    return ""


def list_unsupported(model: nn.Module, sites: Iterable[Site]) -> list[str]:
    """Classes that look like attention but hold no site and stand in none, and why: what a reading
    can't see.
    """
    names = [site.name for site in sites]
    reasons = _reasons(model)
    odd = {
        type(module).__name__
        for name, module in model.named_modules()
        if type(module).__name__ not in reasons
        and UNSEEN.search(type(module).__name__)
        and not any(
            s == name or s.startswith(f"{name}.") or name.startswith(f"{s}.") for s in names
        )
        and not any(
            name.startswith(_parent(s) + ".")
            for s in names
            if _parent(s)
            and re.search(r"Attention", type(model.get_submodule(_parent(s))).__name__)
        )
        and next(module.parameters(), None) is not None
    }
    why = (
        "doesn't go through transformers' attention interface, nor through torch's"
        " scaled_dot_product_attention"
    )
    return sorted(
        [f"{name} {why}" for name in odd]
        + [f"{name}: {reason}" for name, reason in reasons.items()]
    )


def _reasons(model: nn.Module) -> dict[str, str]:
    """Classes whose attention is known but can't be read, and why."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        type(module).__name__: reason
        for name, module in model.named_modules()
        if not uses_interface(module) and (reason := _reason(name, module, modules))
    }


def is_cross(name: str, module: nn.Module) -> bool:
    return bool(
        getattr(module, "is_cross_attention", False)
        or CROSS.search(type(module).__name__)
        or CROSS.search(name.rsplit(".", 1)[-1])
        or CROSS.search(_parent(name).rsplit(".", 1)[-1])
    )


def select_heads(sites: list[Site], labels: Iterable[str]) -> list[tuple[Site, int]]:
    """Labels such as "L12.H3" -> (site, head number). `ValueError` names the nearest label that
    exists.
    """
    if isinstance(labels, str):
        labels = [labels]
    known = {site.head_label(h): (site, h) for site in sites for h in range(site.num_heads)}
    chosen = []
    for label in labels:
        if label not in known:
            near = difflib.get_close_matches(label, known, 1)
            first, last = next(iter(known)), list(known)[-1]
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise MultiheadError(
                f"head {label!r} doesn't exist; {hint}this model's heads are {first} to {last}"
            )
        chosen.append(known[label])
    return chosen


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _path(name: str, modules: dict[str, nn.Module]) -> str:
    """The name, with torch's own name for cross-attention made plain."""
    ours = isinstance(modules.get(_parent(name)), nn.TransformerDecoderLayer) and name.endswith(
        "multihead_attn"
    )
    return f"{_parent(name)}.cross_attn".lstrip(".") if ours else name


def _out_name(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> str:
    dot = f"{name}." if name else ""
    candidates = [dot + n for n in OUT_NAMES] + [
        f"{_parent(name)}.{n}".lstrip(".") for n in PARENT_OUT_NAMES
    ]
    for candidate in candidates:
        if candidate in modules:
            out = modules[candidate]
            if isinstance(out, nn.Sequential) and len(
                out
            ):  # diffusers' habit: to_out = [Linear, Dropout]
                return f"{candidate}.0"
            return candidate
    raise MultiheadError(
        f"{name or 'the model'} ({type(module).__name__}) can't be read: its output projection"
        f" isn't among {', '.join(OUT_NAMES)}; call it by one of these names, or add its name to"
        " OUT_NAMES in multihead/models/site.py"
    )


def _width(name: str, module: nn.Module, out: nn.Module) -> int:
    if not uses_interface(module):
        if in_features(out) % heads_of(module):
            raise MultiheadError(
                f"{name} ({type(module).__name__}) can't be read: its output projection takes"
                f" {in_features(out)}, which its {heads_of(module)} heads don't divide"
            )
        return in_features(out) // heads_of(module)
    for attribute in WIDTH_NAMES:
        if isinstance(value := getattr(module, attribute, None), int):
            return value
    for attribute in NUMBER_NAMES:
        if isinstance(value := getattr(module, attribute, None), int):
            return in_features(out) // value
    raise MultiheadError(
        f"{name} ({type(module).__name__}) can't be read: the width of its heads isn't among"
        f" {', '.join(WIDTH_NAMES)}, nor their number among {', '.join(NUMBER_NAMES)}; add its name"
        " to WIDTH_NAMES or NUMBER_NAMES in multihead/models/site.py"
    )


def _labels(names: list[str]) -> list[str]:
    """Short labels for module paths: the first number is the layer; stacks and kinds are named
    where there are several.
    """
    loose = {name for name in names if not any(map(str.isdigit, name.split(".")))}
    if 0 < len(loose) < len(names):  # a pool at the end, say, has no layer, and goes by its path
        labels = iter(_labels([name for name in names if name not in loose]))
        return [name if name in loose else next(labels) for name in names]
    parts = []
    lead = {name.partition(".")[0] for name in names}
    rest = [name.partition(".")[2] for name in names]
    if (
        len(lead) == 1
        and lead.pop().isdigit()
        and all(re.search(r"(^|\.)\d+\.", name) for name in rest)
    ):
        # one part of an nn.Sequential holds all the layers, so its own number tells nothing
        names = rest
    for name in names:
        words = name.split(".")
        at = next((i for i, w in enumerate(words) if w.isdigit()), None)
        stack = next(
            (
                w
                for w in words[:at]
                if re.search("encoder|decoder|vision|text|audio|visual|tower", w)
            ),
            "",
        )
        cross = "cross" if CROSS.search(".".join(words[-2:])) else ""
        parts.append((stack, f"L{words[at]}" if at is not None else "L0", cross))
    several = len({stack for stack, _, _ in parts}) > 1
    short = [
        ".".join(w for w in (stack if several else "", layer, cross) if w)
        for stack, layer, cross in parts
    ]
    if len(set(short)) == len(short):
        return short
    # several sites in one layer (a window and a pooled one, say): what follows the layer's number
    # tells them apart
    long = [re.sub(r"(?:\w+\.)*?(\d+)\.", r"L\1.", name, count=1) for name in names]
    return long if len(set(long)) == len(long) else names


def _refusal(model: nn.Module) -> str:
    classes = sorted(
        {type(m).__name__ for m in model.modules() if re.search("Attention|Attn", type(m).__name__)}
    )
    what = f"its attention ({', '.join(classes)})" if classes else "it"
    known = "".join(f" {name}: {reason}." for name, reason in _reasons(model).items())
    return (
        f"{type(model).__name__} can't be read: {what} doesn't go through transformers' attention"
        " interface, and is none of torch's, timm's or multihead's layers, so its weights can't be"
        f" reached.{known} Models that do (Llama, Qwen, Gemma, GPT-2, BERT, ViT, Whisper, T5, ...)"
        " can be read, and so can modules of your own that call torch's"
        " scaled_dot_product_attention: docs/reading.md says which"
    )
