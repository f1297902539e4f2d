"""Where the slices of each head lie in W_Q, W_K, W_V and W_O: separate, fused, interleaved,
transposed or latent projections.

The names come from models/names.py. A wrong entry there never breaks a model: surgery compares the
smaller model with the one whose heads are zeroed, and raises with both numbers.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import MultiheadError
from .names import LAYOUTS, find_child, names_of, projection_role


class HasHeads(Protocol):
    """The part of a `Site` from which its slices follow."""

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def out(self) -> nn.Module: ...
    @property
    def out_name(self) -> str: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class HeadSlices:
    """The slices of one projection by head: `index` `[heads, width]` holds the outputs of W_Q, W_K
    or W_V, or the inputs of W_O, that belong to each head.

    >>> rows = HeadSlices("q_proj", nn.Linear(8, 6), torch.arange(6).view(2, 3))
    >>> rows.weight().shape, rows.bias().shape
    (torch.Size([2, 3, 8]), torch.Size([2, 3]))
    """

    name: str  # of the attribute of the attention module; of W_O: its path in the model
    module: nn.Module
    index: Tensor
    inputs: bool = False  # True for W_O

    def weight(self) -> Tensor:
        """`[heads, width, D]`, for Linear and for GPT-2's transposed Conv1D alike."""
        weight = outputs_first(self.module)
        return (weight.T if self.inputs else weight)[self.index]

    def bias(self) -> Tensor | None:
        """`[heads, width]`, or None."""
        bias = self.module.bias
        return None if bias is None else bias[self.index]  # type: ignore[index]

    @torch.no_grad()
    def put(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Write what `weight` and `bias` return."""
        outputs_first(self.module)[self.index] = weight.to(outputs_first(self.module))
        if bias is not None:
            old: Tensor = self.module.bias  # type: ignore[assignment]
            old[self.index] = bias.to(old)


@dataclass(frozen=True)
class SiteSlices:
    """The slices of a site's projections: `q` and `out` by query heads `[H, ...]`, `k` and `v` by
    key/value heads `[G, ...]`.

    >>> import multihead
    >>> from multihead.models import find_sites
    >>> model, _ = multihead.load_builtin()
    >>> slices = find_sites(model)[0].slices()
    >>> slices.num_kv_heads, list(slices.v.weight().shape), list(slices.out.weight().shape)
    (8, [8, 24, 192], [8, 24, 192])
    """

    q: HeadSlices
    k: HeadSlices
    v: HeadSlices
    out: HeadSlices
    layout: str  # of q, k and v: "separate", "latent" or one of LAYOUTS

    @property
    def num_kv_heads(self) -> int:
        return self.v.index.shape[0]


_QKV = tuple[HeadSlices, HeadSlices, HeadSlices, str]  # q, k, v and their layout


def find_slices(site: HasHeads, layout: str | None = None) -> SiteSlices:
    """The slices of W_Q, W_K, W_V and W_O that belong to each head of a site.

    Args:
        site: the attention module with its output projection.
        layout: order of the outputs of a fused projection, one of `LAYOUTS`; by its name unless
            given.

    Raises:
        MultiheadError: an attribute name that isn't known, a projection that isn't a plain Linear
            or Conv1D (an adapter, a quantised one), or a size that doesn't fit the heads.
    """
    q, k, v, layout = _find_qkv(site, layout)
    columns = torch.arange(site.num_heads * site.head_dim, device="cpu").view(site.num_heads, -1)
    out = HeadSlices(site.out_name, _require_plain(site, None, site.out), columns, inputs=True)
    return SiteSlices(q, k, v, out, layout)


def list_head_parameters(site: HasHeads) -> dict[str, Tensor]:
    """The outputs `[H, width]` of gates, and the indices `[H, 1]` of sinks and of norms with a gain
    for each head (Cohere), by the name of the attribute.
    """
    names, heads = names_of(site.module), site.num_heads
    slices = {}
    for name in names.gate:
        part = getattr(site.module, name, None)
        if isinstance(part, nn.Linear) and part.out_features in (heads, heads * site.head_dim):
            slices[name] = torch.arange(part.out_features, device="cpu").view(heads, -1)
    for name in names.sinks:
        part = getattr(site.module, name, None)
        if isinstance(part, nn.Parameter) and part.shape[:1] == (heads,):
            slices[name] = torch.arange(heads, device="cpu")[:, None]
    for name, part in site.module.named_children():
        gain = getattr(part, "weight", None)
        if "norm" in name and isinstance(gain, Tensor) and gain.ndim == 2:
            slices[name] = torch.arange(gain.shape[0], device="cpu")[:, None]
    return slices


# ---- one projection


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is `[inputs, outputs]`, as that of GPT-2's Conv1D."""
    return type(module).__name__ == "Conv1D"


def has_plain_weight(module: nn.Module) -> bool:
    """Whether a Linear or Conv1D applies the parameters `weight` and `bias` that it holds, and they
    can be read.
    """
    weight = module._parameters.get("weight")
    readable = weight is not None and (hasattr(module, "_hf_hook") or not weight.is_meta)
    return readable and _applies_its_weight(module)


def _applies_its_weight(module: nn.Module) -> bool:
    """The same for a weight that may be on the meta device, as while a checkpoint is opened."""
    linear = type(module).__qualname__ in ("Linear", "NonDynamicallyQuantizableLinear")
    known = linear and isinstance(module, nn.Linear) and type(module).__module__.startswith("torch")
    if not (known or is_transposed(module)) or parametrize.is_parametrized(module):
        return False
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
        return False
    weight = module._parameters.get("weight")
    if weight is None or type(weight) not in (nn.Parameter, Tensor):
        return False
    return weight.is_floating_point() and weight.ndim == 2


def outputs_first(module: nn.Module) -> Tensor:
    """The weight as `[outputs, inputs]`."""
    weight: Tensor = module.weight.data  # type: ignore[assignment]
    return weight.T if is_transposed(module) else weight


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """A projection, and the Linear in one that wraps it (adapters, quantised ones)."""
    layers = (module, getattr(module, "base_layer", None), getattr(module, "linear", None))
    return [layer for layer in layers if isinstance(layer, nn.Module)]


def in_features(module: nn.Module) -> int:
    """The width that a projection takes: of a Linear and its relatives, what wraps one, and GPT-2's
    transposed Conv1D.
    """
    for layer in _layers_of(module):
        if isinstance(value := getattr(layer, "in_features", None), int):
            return value
        if is_transposed(layer):
            return int(layer.weight.shape[0])  # type: ignore[index]
    raise MultiheadError(
        f"the output projection is a {type(module).__name__} without an input width, so it can't be"
        " split by heads; expected a Linear or a module with in_features"
    )


def inner_weight(module: nn.Module) -> Tensor | None:
    """The matrix of a projection, or of the Linear that it wraps; None for a norm, an embedding or
    a convolution.
    """
    for layer in _layers_of(module):
        weight: Any = getattr(layer, "weight", None)
        weight = weight() if inspect.ismethod(weight) else weight  # of torch.ao's modules
        if isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(layer, nn.Embedding):
            try:
                in_features(layer)
            except MultiheadError:
                continue
            return weight
    return None


# ---- q, k and v of a site


def _find_qkv(site: HasHeads, layout: str | None) -> _QKV:
    module, heads = site.module, site.num_heads
    names = names_of(module)
    q_name, k_name, v_name = (_find_projection(module, role) for role in ("q", "k", "v"))
    if q_name is None:
        qkv_name = _find_projection(module, "qkv")
        if qkv_name is None:
            raise MultiheadError(
                f"{_cannot(site)}: its projections aren't among {', '.join(names.q)} or, fused,"
                f" {', '.join(names.qkv)}; run multihead.models.register_family("
                f"{type(module).__name__!r}, q=..., k=..., v=...) with their names first"
            )
        return _split_qkv(site, qkv_name, layout or names.layout_of(qkv_name))
    q = _split_evenly(site, q_name, heads)
    kv_name = find_child(module, names.kv)
    if kv_name is not None and k_name is None:
        return _split_kv(site, q, kv_name)
    if k_name is None or v_name is None:
        raise MultiheadError(
            f"{_cannot(site)}: has {q_name} but no projection for keys and values (it may read"
            " those of another layer), so which belong to its heads isn't known"
        )
    size = _num_outputs(_plain(site, v_name))
    groups = size // site.head_dim
    if size % site.head_dim or (not _is_cut(site) and heads % groups):
        raise MultiheadError(
            f"{_cannot(site)}: {v_name} has {size} outputs, expected heads of {site.head_dim}, as"
            f" many as divide its {heads} query heads"
        )
    k, v = (_split_evenly(site, name, groups) for name in (k_name, v_name))
    q_width, k_width = q.index.shape[1], k.index.shape[1]
    # Twice as wide: the outputs of W_Q are a query and a gate.
    if q_width != k_width and (q_width, k_width) != (2 * site.head_dim, site.head_dim):
        raise MultiheadError(
            f"{_cannot(site)}: {k_name} has {_num_outputs(k.module)} outputs, expected {groups}"
            f" keys of {q_width}, as wide as the queries of {q_name}"
        )
    return q, k, v, "separate"


def _find_projection(module: nn.Module, role: str) -> str | None:
    """The name of a projection: by the table, else the first Linear whose name fits the role."""
    names = names_of(module)
    return find_child(module, getattr(names, role)) or next(
        (
            name
            for name, child in module.named_children()
            if type(child) is nn.Linear and projection_role(name, names) == role
        ),
        None,
    )


def _split_evenly(site: HasHeads, name: str, heads: int) -> HeadSlices:
    """Split a projection of queries, keys or values alone."""
    module = _plain(site, name)
    size = _num_outputs(module)
    if size % heads:
        raise MultiheadError(
            f"{_cannot(site)}: {name} has {size} outputs, which {heads} heads don't divide"
        )
    return HeadSlices(name, module, torch.arange(size, device="cpu").view(heads, -1))


def _split_qkv(site: HasHeads, name: str, layout: str) -> _QKV:
    """Split a projection of queries, keys and values."""
    module, heads, width = _plain(site, name), site.num_heads, site.head_dim
    total = _num_outputs(module)
    if layout not in LAYOUTS:
        raise MultiheadError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
    if total % width or (total // width - heads) % 2 or total // width <= heads:
        raise MultiheadError(
            f"{_cannot(site)}: {name} has {total} outputs, expected {heads} queries and as many"
            f" keys as values, of {width} each"
        )
    groups = (total // width - heads) // 2
    if heads % groups and (layout != "blocks" or not _is_cut(site)):
        raise MultiheadError(
            f"{_cannot(site)}: {name} has {groups} keys for {heads} queries, which they don't"
            " divide"
        )
    blocks = torch.arange(total, device="cpu").view(-1, width)
    if layout == "blocks":
        q, k, v = blocks.split([heads, groups, groups])
    else:  # the three of a head are a group with one query
        if layout == "heads" and groups != heads:
            raise MultiheadError(
                f"{_cannot(site)}: {name} has {groups} keys for {heads} queries, so its outputs"
                " can't lie head by head"
            )
        size = heads // groups
        parts = blocks.view(groups, size + 2, width)
        q, k, v = parts[:, :size].reshape(heads, width), parts[:, size], parts[:, size + 1]
    slices = [HeadSlices(name, module, index) for index in (q, k, v)]
    return slices[0], slices[1], slices[2], layout


def _split_kv(site: HasHeads, q: HeadSlices, name: str) -> _QKV:
    """Split keys and values in one: of a latent (each head's key, then its value), or all keys and
    then all values.
    """
    module = _plain(site, name)
    total, heads, width = _num_outputs(module), site.num_heads, site.head_dim
    if names_of(module).layout_of(name) == "latent":
        if total % heads or total // heads <= width:
            raise MultiheadError(
                f"{_cannot(site)}: {name} has {total} outputs, expected a key and a value of"
                f" {width} for each of its {heads} heads"
            )
        outputs = torch.arange(total, device="cpu").view(heads, -1)
        k, v, layout = outputs[:, :-width], outputs[:, -width:], "latent"
    else:
        if total % (2 * width) or (not _is_cut(site) and heads % (total // width // 2)):
            raise MultiheadError(
                f"{_cannot(site)}: {name} has {total} outputs, expected as many keys as values of"
                f" {width}, as many as divide its {heads} query heads"
            )
        (k, v), layout = torch.arange(total, device="cpu").view(2, -1, width), "blocks"
    return q, HeadSlices(name, module, k), HeadSlices(name, module, v), layout


def _is_cut(site: HasHeads) -> bool:
    """Whether heads were removed, after which key/value heads may be shared unevenly."""
    return getattr(site.module, "multihead", None) is not None


def _plain(site: HasHeads, name: str) -> nn.Module:
    return _require_plain(site, name, getattr(site.module, name))


def _require_plain(site: HasHeads, name: str | None, part: nn.Module) -> nn.Module:
    """Return the projection if it is a Linear or Conv1D; `name` is None for W_O."""
    called, parts = (name, "outputs") if name else ("its output projection", "inputs")
    if hasattr(part, "base_layer") or hasattr(part, "lora_A"):
        raise MultiheadError(
            f"{_cannot(site)}: {called} carries an adapter; merge it into the model first (peft:"
            " merge_and_unload)"
        )
    linear = type(part) is nn.Linear if name else isinstance(part, nn.Linear)
    kind = type(part).__name__
    kind = f"{type(part).__module__}.{kind}" if kind == "Linear" else kind
    if parametrize.is_parametrized(part) or hasattr(part, "weight_g"):
        raise MultiheadError(
            f"{_cannot(site)}: the weight of {called} is parametrized; make it a plain one first"
            " (torch.nn.utils.parametrize.remove_parametrizations, or remove_weight_norm)"
        )
    if not linear and not is_transposed(part):
        raise MultiheadError(
            f"{_cannot(site)}: {called} is a {kind}, whose {parts} can't be split by heads;"
            " expected a Linear (load a quantised model in float32 or bfloat16 first)"
        )
    if hasattr(part, "_hf_hook"):
        raise MultiheadError(
            f"{_cannot(site)}: {called} is offloaded or placed by accelerate, which keeps its"
            " weights elsewhere; load the model into memory, without device_map, first"
        )
    if not _applies_its_weight(part):
        weight = getattr(part, "weight", None)
        raise MultiheadError(
            f"{_cannot(site)}: the weight of {called} is a {type(weight).__name__}, which can't be"
            " split by heads; expected a plain parameter (load a quantised model in float32 or"
            " bfloat16, and a sharded one whole, first)"
        )
    return part


def _num_outputs(module: nn.Module) -> int:
    return outputs_first(module).shape[0]


def _cannot(site: HasHeads) -> str:
    return f"{site.name} ({type(site.module).__name__}) can't be pruned"
