"""Where each head's rows of W_Q, W_K and W_V lie in a site: separate, fused, interleaved,
transposed, latent.

What differs between families stands in the tables below, as in sites.py. Surgery compares what it
made with the model whose heads are zeroed, so an entry that is wrong here is an error with both
numbers, and never a broken model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from .site import Site

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


@dataclass(frozen=True)
class Rows:
    """Rows of one projection: `index` [heads, width] numbers those of its outputs that belong to
    each head.
    """

    name: str  # of the attribute of the attention module
    module: nn.Module
    index: Tensor

    def weight(self) -> Tensor:
        """`[heads, width, inputs]`, for Linear and for GPT-2's transposed Conv1D alike."""
        return outputs_first(self.module)[self.index]

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
class Projections:
    """What makes queries, keys and values of a site: `q` by query heads `[H, ...]`, `k` and `v` by
    key/value heads `[G, ...]`.
    """

    q: Rows
    k: Rows
    v: Rows
    layout: str = "separate"  # or "latent" or one of LAYOUTS

    @property
    def num_kv_heads(self) -> int:
        return self.v.index.shape[0]


def transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def outputs_first(module: nn.Module) -> Tensor:
    weight: Tensor = module.weight.data  # type: ignore[assignment]
    return weight.T if transposed(module) else weight


def projections(site: Site, layout: str | None = None) -> Projections:
    """The rows of W_Q, W_K and W_V that belong to each head of a site.

    `layout` says how a fused projection is laid out; without it the table does. Raises `ValueError`
    where none of the names in the tables is there, the projection isn't a plain Linear or Conv1D
    (an adapter, a quantised one), or its size doesn't fit the heads.
    """
    module, heads, width = site.module, site.num_heads, site.width
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
    q = Rows(name, _plain(site, name), _even(site, name, heads))
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
    return Projections(
        q,
        Rows(k_name, _plain(site, k_name), _even(site, k_name, groups)),
        Rows(v_name, _plain(site, v_name), _even(site, v_name, groups)),
    )


def per_head(site: Site) -> dict[str, Tensor]:
    """What else a site holds by query heads, name -> `[H, width]` of rows: gates and sinks."""
    found = {}
    for name in HEAD_ROWS:
        part = getattr(site.module, name, None)
        if isinstance(part, nn.Linear) and part.out_features in (
            site.num_heads,
            site.num_heads * site.width,
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


def _fused(site: Site, name: str, layout: str) -> Projections:
    module, heads, width = _plain(site, name), site.num_heads, site.width
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
    return Projections(Rows(name, module, q), Rows(name, module, k), Rows(name, module, v), layout)


def _key_values(site: Site, q: Rows, name: str) -> Projections:
    """Keys and values in one: of a latent (each head's key, then its value), or all keys and then
    all values.
    """
    module = _plain(site, name)
    total = _outputs(module)
    if name == "kv_b_proj":
        if total % site.num_heads or total // site.num_heads <= site.width:
            raise MultiheadError(
                f"{_called(site)}: {name} has {total} outputs, which aren't a key and a value of"
                f" {site.width} for each of its {site.num_heads} heads"
            )
        rows = torch.arange(total).view(site.num_heads, -1)
        return Projections(
            q,
            Rows(name, module, rows[:, : -site.width]),
            Rows(name, module, rows[:, -site.width :]),
            "latent",
        )
    whole = getattr(site.module, "multihead", None) is None
    if total % (2 * site.width) or (whole and site.num_heads % (total // site.width // 2)):
        raise MultiheadError(
            f"{_called(site)}: {name} has {total} outputs, which aren't as many keys as values of"
            f" {site.width} that divide {site.num_heads} heads"
        )
    k, v = torch.arange(total).view(2, -1, site.width)
    return Projections(q, Rows(name, module, k), Rows(name, module, v), "blocks")


def _of(module: nn.Module, names: tuple[str, ...]) -> str | None:
    return next(
        (name for name in names if isinstance(getattr(module, name, None), nn.Module)), None
    )


def _plain(site: Site, name: str) -> nn.Module:
    part: nn.Module = getattr(site.module, name)
    if hasattr(part, "base_layer") or hasattr(part, "lora_A"):
        raise MultiheadError(
            f"{_called(site)}: {name} carries an adapter; merge it into the model first (peft:"
            " merge_and_unload)"
        )
    if type(part) is not nn.Linear and not transposed(part):
        raise MultiheadError(
            f"{_called(site)}: {name} is a {type(part).__name__}, whose rows can't be taken apart"
            " by heads; expected a Linear (load a quantised model in float32 or bfloat16 first)"
        )
    return part


def plain_out(site: Site) -> nn.Module:
    """W_O as a module whose columns can be cut; `ValueError` where it isn't a plain Linear or
    Conv1D.
    """
    out = site.out
    if hasattr(out, "base_layer") or hasattr(out, "lora_A"):
        raise MultiheadError(
            f"{_called(site)}: its output projection carries an adapter; merge it into the model"
            " first (peft: merge_and_unload)"
        )
    if not isinstance(out, nn.Linear) and not transposed(out):
        raise MultiheadError(
            f"{_called(site)}: its output projection is a {type(out).__name__}, whose columns can't"
            " be taken apart by heads; expected a Linear (load a quantised model in float32 or"
            " bfloat16 first)"
        )
    return out


def _even(site: Site, name: str, heads: int) -> Tensor:
    size = _outputs(_plain(site, name))
    if size % heads:
        raise MultiheadError(
            f"{_called(site)}: {name} has {size} outputs, which {heads} heads don't divide"
        )
    return torch.arange(size).view(heads, -1)


def _outputs(module: nn.Module) -> int:
    return outputs_first(module).shape[0]


def _called(site: Site) -> str:
    return f"{site.name} ({type(site.module).__name__}) can't be pruned"
