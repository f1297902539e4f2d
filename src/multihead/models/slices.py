"""Where each head's rows of W_Q, W_K and W_V lie in a site: separate, fused, interleaved,
transposed, latent.

What differs between families stands in the tables below, as in sites.py. Surgery compares what it
made with the model whose heads are zeroed, so an entry that is wrong here is an error with both
numbers, and never a broken model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import MultiheadError

Q_NAMES = (
    "q_b_proj",
    "q_proj",
    "query",
    "q_lin",
    "linear_q",
    "to_q",
    "q_attn",
    "query_proj",
    "wq",
    "Wq",
    "q",
)
K_NAMES = ("k_proj", "key", "k_lin", "linear_k", "to_k", "key_proj", "wk", "Wk", "k")
V_NAMES = ("v_proj", "value", "v_lin", "linear_v", "to_v", "value_proj", "wv", "Wv", "v")
KV_NAMES = (
    "kv_b_proj",
    "kv_proj",
    "c_attn",
    "to_kv",
    "kv",
)  # keys and values in one, queries apart
QKV_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "in_proj", "W_pack")
HEAD_ROWS = (
    "gate_proj",
    "g_proj",
    "gate",
)  # rows by query heads, in whole heads or one number a head
HEAD_PARAMETERS = ("sinks", "sink")  # one number a query head
# How a fused projection is laid out: all queries, then all keys, then all values; a head's three
# one after another; or a
# group's queries, its key and its value. The first is tried last where the name says nothing.
LAYOUTS = ("blocks", "heads", "groups")
BY_NAME = {"query_key_value": "heads"}


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
        """`[heads, width]`."""
        bias = self.module.bias
        return None if bias is None else bias[self.index]  # type: ignore[index]

    @torch.no_grad()
    def put(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Writes what `weight` and `bias` give."""
        outputs_first(self.module)[self.index] = weight.to(outputs_first(self.module))
        if bias is not None:
            old: Tensor = self.module.bias  # type: ignore[assignment]
            old[self.index] = bias.to(old)


@dataclass(frozen=True)
class SiteSlices:
    """The slices of a site's projections: `q` and `out` by query heads `[H, ...]`, `k` and `v` by
    key/value heads `[G, ...]`.
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


def is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def outputs_first(module: nn.Module) -> Tensor:
    weight: Tensor = module.weight.data  # type: ignore[assignment]
    return weight.T if is_transposed(module) else weight


def find_slices(site: HasHeads, layout: str | None = None) -> SiteSlices:
    """The slices of W_Q, W_K, W_V and W_O that belong to each head of a site.

    Args:
        site: the attention module with its output projection.
        layout: order of the outputs of a fused projection, one of `LAYOUTS`; by name unless given.

    Raises:
        MultiheadError: an attribute name that isn't known, a projection that isn't a plain Linear
            or Conv1D (an adapter, a quantised one), or a size that doesn't fit the heads.
    """
    q, k, v, layout = _find_qkv(site, layout)
    columns = torch.arange(site.num_heads * site.head_dim).view(site.num_heads, -1)
    return SiteSlices(q, k, v, HeadSlices(site.out_name, _plain_out(site), columns, True), layout)


def _find_qkv(site: HasHeads, layout: str | None) -> _QKV:
    module, heads, width = site.module, site.num_heads, site.head_dim
    name = _of(module, Q_NAMES)
    if name is None:
        fused = _of(module, QKV_NAMES)
        if fused is None:
            raise MultiheadError(
                f"{_called(site)}: its projections aren't among {', '.join(Q_NAMES)} or, fused,"
                f" {', '.join(QKV_NAMES)}; add their names to the tables in"
                " multihead/models/slices.py"
            )
        return _fused(site, fused, layout or BY_NAME.get(fused, LAYOUTS[0]))
    q = HeadSlices(name, _plain(site, name), _even(site, name, heads))
    both = _of(module, KV_NAMES)
    if both is not None and _of(module, K_NAMES) is None:
        return _key_values(site, q, both)
    k_name, v_name = _of(module, K_NAMES), _of(module, V_NAMES)
    if k_name is None or v_name is None:
        raise MultiheadError(
            f"{_called(site)}: has {name} but no projection of keys and values of its own (a layer"
            " that reads another's keys, say), so which belong to its heads isn't known"
        )
    size = _outputs(_plain(site, v_name))
    whole = getattr(module, "multihead", None) is None  # heads that were cut may share unevenly
    if size % width or (whole and heads % (size // width)):
        raise MultiheadError(
            f"{_called(site)}: {v_name} has {size} outputs, which isn't a number of heads of "
            f"{width} that divides {heads}"
        )
    groups = size // width
    return (
        q,
        HeadSlices(k_name, _plain(site, k_name), _even(site, k_name, groups)),
        HeadSlices(v_name, _plain(site, v_name), _even(site, v_name, groups)),
        "separate",
    )


def list_head_parameters(site: HasHeads) -> dict[str, Tensor]:
    """What else a site holds by query heads, name -> `[H, width]` of rows: gates and sinks."""
    found = {}
    for name in HEAD_ROWS:
        part = getattr(site.module, name, None)
        if isinstance(part, nn.Linear) and part.out_features in (
            site.num_heads,
            site.num_heads * site.head_dim,
        ):
            found[name] = torch.arange(part.out_features).view(site.num_heads, -1)
    for name in HEAD_PARAMETERS:
        part = getattr(site.module, name, None)
        if isinstance(part, nn.Parameter) and part.shape[:1] == (site.num_heads,):
            found[name] = torch.arange(site.num_heads)[:, None]
    for (
        name,
        part,
    ) in (
        site.module.named_children()
    ):  # norms with a gain of their own for each head, as Cohere has
        gain = getattr(part, "weight", None)
        if "norm" in name and isinstance(gain, Tensor) and gain.ndim == 2:
            found[name] = torch.arange(gain.shape[0])[:, None]
    return found


def _fused(site: HasHeads, name: str, layout: str) -> _QKV:
    module, heads, width = _plain(site, name), site.num_heads, site.head_dim
    total = _outputs(module)
    if layout not in LAYOUTS:
        raise MultiheadError(f"layout={layout!r} isn't one of {', '.join(LAYOUTS)}")
    if total % width or (total // width - heads) % 2 or total // width <= heads:
        raise MultiheadError(
            f"{_called(site)}: {name} has {total} outputs, which aren't {heads} queries and as many"
            f" keys as values, of {width} each"
        )
    groups = (total // width - heads) // 2
    if heads % groups and (layout != "blocks" or getattr(site.module, "multihead", None) is None):
        raise MultiheadError(
            f"{_called(site)}: {name} has {groups} keys for {heads} queries, which they don't"
            " divide"
        )
    blocks = torch.arange(total).view(-1, width)
    if layout == "blocks":
        q, k, v = blocks.split([heads, groups, groups])
    else:  # a head's three are a group with one query
        if layout == "heads" and groups != heads:
            raise MultiheadError(
                f"{_called(site)}: {name} has {groups} keys for {heads} queries, so they can't lie"
                " head by head"
            )
        each = heads // groups
        parts = blocks.view(groups, each + 2, width)
        q, k, v = parts[:, :each].reshape(heads, width), parts[:, each], parts[:, each + 1]
    return (
        HeadSlices(name, module, q),
        HeadSlices(name, module, k),
        HeadSlices(name, module, v),
        layout,
    )


def _key_values(site: HasHeads, q: HeadSlices, name: str) -> _QKV:
    """Keys and values in one: of a latent (each head's key, then its value), or all keys and then
    all values.
    """
    module = _plain(site, name)
    total = _outputs(module)
    if name == "kv_b_proj":
        if total % site.num_heads or total // site.num_heads <= site.head_dim:
            raise MultiheadError(
                f"{_called(site)}: {name} has {total} outputs, which aren't a key and a value of"
                f" {site.head_dim} for each of its {site.num_heads} heads"
            )
        rows = torch.arange(total).view(site.num_heads, -1)
        k, v = rows[:, : -site.head_dim], rows[:, -site.head_dim :]
        return q, HeadSlices(name, module, k), HeadSlices(name, module, v), "latent"
    whole = getattr(site.module, "multihead", None) is None
    if total % (2 * site.head_dim) or (whole and site.num_heads % (total // site.head_dim // 2)):
        raise MultiheadError(
            f"{_called(site)}: {name} has {total} outputs, which aren't as many keys as values of"
            f" {site.head_dim} that divide {site.num_heads} heads"
        )
    k, v = torch.arange(total).view(2, -1, site.head_dim)
    return q, HeadSlices(name, module, k), HeadSlices(name, module, v), "blocks"


def _of(module: nn.Module, names: tuple[str, ...]) -> str | None:
    return next(
        (name for name in names if isinstance(getattr(module, name, None), nn.Module)), None
    )


def _plain(site: HasHeads, name: str) -> nn.Module:
    part: nn.Module = getattr(site.module, name)
    if hasattr(part, "base_layer") or hasattr(part, "lora_A"):
        raise MultiheadError(
            f"{_called(site)}: {name} carries an adapter; merge it into the model first (peft:"
            " merge_and_unload)"
        )
    if type(part) is not nn.Linear and not is_transposed(part):
        raise MultiheadError(
            f"{_called(site)}: {name} is a {type(part).__name__}, whose rows can't be taken apart"
            " by heads; expected a Linear (load a quantised model in float32 or bfloat16 first)"
        )
    return part


def _plain_out(site: HasHeads) -> nn.Module:
    """W_O as a module whose columns can be cut; `ValueError` where it isn't a plain Linear or
    Conv1D.
    """
    out = site.out
    if hasattr(out, "base_layer") or hasattr(out, "lora_A"):
        raise MultiheadError(
            f"{_called(site)}: its output projection carries an adapter; merge it into the model"
            " first (peft: merge_and_unload)"
        )
    if not isinstance(out, nn.Linear) and not is_transposed(out):
        raise MultiheadError(
            f"{_called(site)}: its output projection is a {type(out).__name__}, whose columns can't"
            " be taken apart by heads; expected a Linear (load a quantised model in float32 or"
            " bfloat16 first)"
        )
    return out


def _even(site: HasHeads, name: str, heads: int) -> Tensor:
    size = _outputs(_plain(site, name))
    if size % heads:
        raise MultiheadError(
            f"{_called(site)}: {name} has {size} outputs, which {heads} heads don't divide"
        )
    return torch.arange(size).view(heads, -1)


def _outputs(module: nn.Module) -> int:
    return outputs_first(module).shape[0]


def _called(site: HasHeads) -> str:
    return f"{site.name} ({type(site.module).__name__}) can't be pruned"
