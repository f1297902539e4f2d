"""Attribute names of attention modules: head counts, head widths and projections, in one table.

`NAMES` is the table, `register_family` adds the names of an attention class from outside, and
`names_of(module)` is what holds for one module. Here, too: the numbers that mean "may not read"
(`is_masking`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError, did_you_mean

# Orders of the outputs of a fused projection: all queries, then all keys, then all values; the
# three of a head one after another; or the queries of a group, its key and its value.
LAYOUTS = ("blocks", "heads", "groups")


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split())


@dataclass(frozen=True)
class Names:
    """Attribute names by role, those to try first in front. Counts and widths are integers on the
    attention module, projections are its children.
    """

    # Query heads H, key/value heads G, and H / G.
    num_heads: tuple[str, ...] = _split(
        "num_heads num_attention_heads n_heads n_head nhead heads num_q_heads num_query_heads "
        "nheads n_local_heads h H"
    )
    num_kv_heads: tuple[str, ...] = _split(
        "num_kv_heads num_key_value_heads n_kv_heads n_kv_head kv_heads num_kv n_local_kv_heads "
        "num_kv_groups"
    )
    group_size: tuple[str, ...] = _split("num_key_value_groups num_queries_per_kv kv_groups n_rep")
    # Width of a head: of its values where they differ from its keys, and of both.
    value_dim: tuple[str, ...] = _split("v_head_dim")
    # Widths of MLA: of the latents of keys and values, and of queries, and of the rotary part of a
    # head.
    kv_latent_dim: tuple[str, ...] = _split("kv_latent_dim kv_lora_rank")
    q_latent_dim: tuple[str, ...] = _split("q_latent_dim q_lora_rank")
    rotary_dim: tuple[str, ...] = _split("qk_rope_head_dim rotary_dim")
    head_dim: tuple[str, ...] = _split(
        "head_dim attention_head_size key_value_proj_dim head_size d_k d_head dim_head"
    )
    # Width of the model, of all queries side by side, and of all keys side by side.
    embed_dim: tuple[str, ...] = _split(
        "embed_dim d_model hidden_size n_embd emb_dim embed_size d_in dim width d"
    )
    q_width: tuple[str, ...] = _split(
        "all_head_size inner_dim split_size q_size q_dim attn_dim embed_dim internal_dim proj_dim"
    )
    kv_width: tuple[str, ...] = _split("kv_dim kv_size")
    # Projections: separate, keys and values in one, all three in one, and W_O, which BERT and its
    # relatives keep next to the attention module.
    q: tuple[str, ...] = _split(
        "q_b_proj q_up_proj q_proj query q_lin linear_q to_q q_attn query_proj wq Wq q"
    )
    k: tuple[str, ...] = _split("k_proj key k_lin linear_k to_k key_proj wk Wk k")
    v: tuple[str, ...] = _split("v_proj value v_lin linear_v to_v value_proj wv Wv v")
    kv: tuple[str, ...] = _split("kv_b_proj kv_up_proj kv_proj c_attn to_kv kv")
    qkv: tuple[str, ...] = _split(
        "qkv_proj query_key_value c_attn Wqkv qkv in_proj W_pack att_proj"
    )
    out: tuple[str, ...] = _split(
        "o_proj out_proj c_proj proj o projection dense Wo to_out out_lin linear_out "
        "projection_layer output_projection output wo w_o W_O out fc_out"
    )
    parent_out: tuple[str, ...] = _split("output.dense dense")
    # Gates with outputs by query head, and parameters with one number a query head.
    gate: tuple[str, ...] = _split("gate_proj g_proj gate")
    sinks: tuple[str, ...] = _split("sinks sink")
    # Layouts of fused projections that aren't "blocks".
    layouts: tuple[tuple[str, str], ...] = (
        ("query_key_value", "heads"),
        ("kv_b_proj", "latent"),
        ("kv_up_proj", "latent"),
    )

    def layout_of(self, name: str) -> str:
        """The layout of a fused projection, one of `LAYOUTS`; or "latent": from a latent (MLA),
        the key and the value of a head one after another.
        """
        return dict(self.layouts).get(name, LAYOUTS[0])


NAMES = Names()
_FAMILIES: dict[str | type, Names] = {}


def register_family(
    attention: str | type, *, layout: str | None = None, **names: str | Iterable[str]
) -> None:
    """Add the attribute names that an attention class uses, so that its models can be read, pruned
    and counted.

    Args:
        attention: the class of the attention modules, or its name. Subclasses are covered.
        layout: order of the outputs of the projection given as `qkv`: "blocks" (all queries, all
            keys, all values; the default), "heads" (query, key and value of one head after the
            other) or "groups" (queries, key and value of one group after the other).
        **names: attribute names by role, tried in front of the known ones. Integers: `num_heads`,
            `num_kv_heads`, `group_size`, `head_dim`, `value_dim`, `embed_dim`, `q_width`,
            `kv_width`, `kv_latent_dim`, `q_latent_dim`, `rotary_dim`. Modules: `q`, `k`, `v`,
            `kv`, `qkv`, `out`, `gate`; `parent_out` is a path from the parent of the attention
            module. Parameters: `sinks`.

    Raises:
        MultiheadError: a role or layout that isn't known, an empty name.
        TypeError: names that aren't strings.

    >>> names = dict(num_heads="my_heads", out="mix", q="ask", k="offer", v="give")
    >>> register_family("MyAttention", **names)
    """
    if not isinstance(attention, (str, type)):
        raise TypeError(f"attention={attention!r}: expected a class or the name of one")
    known = {field.name for field in fields(Names)} - {"layouts"}
    added: dict[str, tuple[Any, ...]] = {}
    for role, value in names.items():
        if role not in known:
            raise MultiheadError(
                f"{role}={value!r}: unknown role; {did_you_mean(role, known)}expected"
                f" {', '.join(sorted(known))}"
            )
        chosen = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(name, str) for name in chosen):
            raise TypeError(f"{role}={value!r}: expected an attribute name, or several")
        if not all(chosen):
            raise MultiheadError(f"{role}={value!r}: expected an attribute name, not an empty one")
        added[role] = chosen
    if layout is not None:
        if layout not in LAYOUTS:
            raise MultiheadError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
        if "qkv" not in added:
            raise MultiheadError(f"layout={layout!r}: give the fused projection's name too, qkv=")
        added["layouts"] = tuple((name, layout) for name in added["qkv"])
    _FAMILIES[attention] = replace(
        NAMES, **{role: value + getattr(NAMES, role) for role, value in added.items()}
    )


def names_of(module: nn.Module) -> Names:
    """The names that hold for a module: the table, after those registered for its class."""
    for base in type(module).__mro__ if _FAMILIES else ():
        if (names := _FAMILIES.get(base) or _FAMILIES.get(base.__name__)) is not None:
            return names
    return NAMES


def find_number(module: Any, names: Iterable[str]) -> int | None:
    """The first of these attributes that is a positive integer.

    >>> find_number(nn.MultiheadAttention(8, 2), NAMES.num_heads)
    2
    """
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def find_child(module: nn.Module, names: Iterable[str]) -> str | None:
    """The first of these attributes that is a module."""
    return next((n for n in names if isinstance(getattr(module, n, None), nn.Module)), None)


# ---- roles of projections, by name alone

_WORDS = r"(_?proj\w*|_?lin\w*|_?layer|_?net|_?w|_?fc|_?attn)?"
_LEAD = r"(to_?|w_?|fc_?|lin_?|linear_?|proj_?)?_?"
_PATTERNS = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        ("q_down", r"w?q_(a|down)(_proj|_layernorm)?"),
        ("kv_down", r"w?kv_(a|down)(_proj|_layernorm)?(_with_mqa)?"),
        ("qkv", r"(to_?|w_?|proj_?)?_?qkv(_?proj|_?lin\w*|_?layer|_?w)?|qkv_?\w*|kqv\w*"),
        ("kv", r"(to_?|w_?)?_?kv(_b|_up)?(_?proj|_?lin\w*)?|key_value"),
        ("q", rf"{_LEAD}q(uer(y|ies))?(_b|_up|_gate)?{_WORDS}"),
        ("k", rf"{_LEAD}k(eys?)?{_WORDS}"),
        ("v", rf"{_LEAD}v(alues?)?{_WORDS}"),
        (
            "out",
            r"(attention_?|to_?|w_?|fc_?|lin_?|linear_?|unify)?_?(o|out|output|heads?)"
            r"(_?proj\w*|_?lin\w*|_?w|_?layer|_?net|_?fc)?"
            r"|(c_?)?proj(ection)?|dense|final\w*|combine\w*|mix|ff",
        ),
    )
)


@cache
def projection_role(name: str, names: Names = NAMES) -> str | None:
    """The role of a projection by its name alone: "q", "k", "v", "kv", "qkv", "out", "q_down" or
    "kv_down" (into the latent of MLA); None for anything else.

    First by the table, then by patterns that cover hand-written modules. Case doesn't matter.

    >>> names = "q_proj", "to_keys", "Wqkv", "kv_a_proj_with_mqa", "norm"
    >>> [projection_role(name) for name in names]
    ['q', 'k', 'qkv', 'kv_down', None]
    """
    name = re.sub(r"_?weights?$|_(bias|kernel)$", "", name.lower())
    for role in ("qkv", "kv", "q", "k", "v", "out"):
        if name in map(str.lower, getattr(names, role)):
            return role
    return next((role for role, pattern in _PATTERNS if pattern.fullmatch(name)), None)


# ---- numbers that mean "may not read"

# Numbers from which on a bias may forbid. Older models write -10000 for padding, to which a bias
# may have been added; then half of float16's lowest and its lowest, -1e5 and -1e6 in bfloat16.
FORBIDDING = (-9500.0, -32752.0, -65472.0, -99840.0, -999424.0)
# From the last on, and from half of the lowest number of a dtype, every number forbids.
GAP = 2  # a bias that forbids is so many times as low as the lowest that doesn't


def is_masking(bias: Tensor) -> Tensor:
    """True where a number that is added to the scores means "may not read": bool, shaped as `bias`.

    That is -1e6 and below, half of the lowest number that the dtype has, and -9500 and below where
    no bias comes near: ALiBi's slopes times distances reach -10000 too, but by small steps. The
    axes don't matter.

    >>> is_masking(torch.tensor([0.0, -100.0, -10000.0, -torch.inf]))
    tensor([False, False,  True,  True])
    >>> bool(is_masking(-torch.arange(5000.0, 10001.0)).any())
    False
    """
    if not bias.is_floating_point():
        bias = bias.to(torch.float64)
    seen = bias  # axes along which it is expanded once
    for axis in range(bias.ndim):
        if bias.stride(axis) == 0 and bias.shape[axis] > 1:
            seen = seen.narrow(axis, 0, 1)
    low = seen <= FORBIDDING[0]
    if bool(low.any()):
        low = seen <= _highest_forbidding(seen, low)
    return low.expand_as(bias)


def _highest_forbidding(bias: Tensor, low: Tensor) -> float:
    surely = max(torch.finfo(bias.dtype).min / 2, FORBIDDING[-1])
    for level in FORBIDDING:
        if level <= surely:
            break
        low = bias <= level
        finite = low & (bias > -torch.inf)
        if not bool(finite.any()):
            return level
        highest = float(bias.masked_fill(~finite, -torch.inf).max())
        if highest <= GAP * float(bias.masked_fill(low, 0).nan_to_num(0).min()):
            return level
    return surely


# ---- entries of a config file

STATES_WIDTH = re.compile("hidden_size|d_model|n_embd|dim|width|embed")
STATES_HEADS = re.compile("heads?$|heads_per|n_head")

# Numbers of key/value heads, of query heads (by layer too), and widths of a head.
KV_HEADS_ENTRY = re.compile(
    r"(^|_)(kv|key_value)_?(attention_)?heads?|heads?_kv$|query_groups$|multi_query_group"
)
HEADS_ENTRY = re.compile(r"(^|_)n?_?heads?(_per_(layer|stage))?$")
HEAD_DIM_ENTRY = re.compile(r"^(head_dim|head_size|attention_head_size|d_kv|kv_channels)$")
