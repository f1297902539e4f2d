"""Checks of the arguments of the attention layers' constructors, and their description."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from ..errors import MultiheadError
from ..ops.masks import IntervalMask
from ..ops.numbers import default_scale, to_float
from .norms import KINDS, NORMS
from .position_bias import PositionBias
from .require import require_positive_int
from .rotary import Rotary

GATES = ("head", "elementwise")


def check_sizes(
    *, embed_dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, **dims: Any
) -> tuple[int, int]:
    """`num_kv_heads` and `head_dim`, with their defaults filled in."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, size in {**sizes, "head_dim": head_dim, **dims}.items():
        if size is not None:
            require_positive_int(name, size)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % num_kv_heads:
        raise MultiheadError(
            f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}; every key/value"
            f" head serves the same number of query heads, so give a divisor of {num_heads}"
        )
    if head_dim is None and embed_dim % num_heads:
        raise MultiheadError(
            f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; change one of them,"
            " or give head_dim"
        )
    return num_kv_heads, embed_dim // num_heads if head_dim is None else head_dim


def check_options(qk_norm: Any, gate: Any, mask: Any = None) -> None:
    is_factory = callable(qk_norm) and not isinstance(qk_norm, nn.Module)
    is_name = isinstance(qk_norm, str) and qk_norm in NORMS
    if qk_norm is not None and not is_name and not is_factory:
        raise MultiheadError(
            f"qk_norm={qk_norm!r}: expected {', '.join(map(repr, NORMS))}, a callable that creates"
            " a module from head_dim, or None"
        )
    if gate is not None and gate not in GATES:
        raise MultiheadError(f"gate={gate!r}: expected {' or '.join(map(repr, GATES))}, or None")
    check_rule(mask)


def check_rule(mask: Any) -> None:
    """Check a mask of every call."""
    if mask is not None and not isinstance(mask, IntervalMask):
        raise TypeError(
            f"mask is {type(mask).__name__}: expected an interval mask such as causal(), which fits"
            " every length, or None; a dense mask is an argument of the call"
        )


def to_scale(scale: Any) -> float:
    """The factor of the scores.

    >>> to_scale(1)
    1.0
    """
    number = to_float("scale", scale)
    if not 0 < number < math.inf:
        raise MultiheadError(
            f"scale={number}: expected a finite number above 0, or None for 1 / sqrt(head_dim)"
        )
    return number


def to_clip(clip_qkv: Any) -> float:
    """The limit of queries, keys and values.

    >>> to_clip(8)
    8.0
    """
    number = to_float("clip_qkv", clip_qkv)
    if not 0 < number < math.inf:
        raise MultiheadError(f"clip_qkv={number}: expected a finite number above 0, or None")
    return number


def describe_options(layer: Any) -> str:
    """Sizes of a layer and those options that differ from their defaults, for its `repr`."""
    sizes = ("num_heads", "num_kv_heads", "head_dim")
    parts = [f"{name}={getattr(layer, name)}" for name in sizes]
    is_default = layer.scale == default_scale(layer.head_dim)
    given = {
        "scale": None if is_default else layer.scale,
        "mask": layer.mask,
        "clip_qkv": layer.clip_qkv,
        "softcap": layer.softcap,
        "gate": layer.gate,
        "sinks": None if layer.sinks is None else True,
        "bias_kv": None if layer.bias_k is None else True,
        "dropout": layer.dropout or None,
        "out_dropout": layer.out_dropout or None,
    }
    return ", ".join(parts + [f"{name}={x}" for name, x in given.items() if x is not None])


def check_position_encoding(positions: Any, num_heads: int, head_dim: int) -> None:
    if positions is not None and not isinstance(positions, nn.Module):
        raise TypeError(
            f"positions={positions!r}: expected a module such as Rotary({head_dim}) or"
            f" ALiBi({num_heads}), or None; the positions of the tokens are forward's position_ids"
        )
    rotated_dim = getattr(positions, "head_dim", head_dim)
    if rotated_dim != head_dim:
        raise MultiheadError(
            f"positions={positions} is for heads of width {rotated_dim}, but head_dim={head_dim}"
        )
    if isinstance(positions, PositionBias) and positions.num_heads != num_heads:
        raise MultiheadError(
            f"positions={positions} is for {positions.num_heads} heads, but num_heads={num_heads}"
        )


def check_latent_options(positions: Any, rotary_dim: int, norm: Any, mask: Any) -> None:
    """Check the options of `LatentAttention`."""
    if positions is None and rotary_dim % 2:
        raise MultiheadError(
            f"rotary_dim={rotary_dim}: rotary positions rotate pairs of components; give an even"
            " number"
        )
    is_called = isinstance(positions, nn.Module) and not isinstance(positions, PositionBias)
    if positions is not None and not is_called:
        raise TypeError(
            f"positions={positions!r}: expected a module that is called on queries and keys, such"
            f" as Rotary({rotary_dim}), or None for that"
        )
    rotated_dim = getattr(positions, "head_dim", rotary_dim)
    if rotated_dim != rotary_dim:
        raise MultiheadError(
            f"positions={positions} is for heads of width {rotated_dim}, but"
            f" rotary_dim={rotary_dim}; it is called on the rotary part alone"
        )
    is_name = isinstance(norm, str) and norm in KINDS
    is_factory = callable(norm) and not isinstance(norm, nn.Module)
    if norm is not None and not is_name and not is_factory:
        raise MultiheadError(
            f"norm={norm!r}: expected {', '.join(map(repr, KINDS))}, a callable that creates a"
            " module from the width of a latent, or None"
        )
    check_rule(mask)


def check_cos_sin(positions: Any, position_ids: object, is_self: bool) -> None:
    """Check that rotations which were computed before have a meaning in this call."""
    if not isinstance(positions, Rotary):
        raise MultiheadError(
            f"cos_sin is for layers whose positions= is a Rotary, and this one's is {positions!r};"
            " leave it out"
        )
    if position_ids is not None:
        raise MultiheadError(
            "cos_sin and position_ids: the cosines are those of positions; give one of the two"
        )
    if not is_self:
        raise MultiheadError(
            "cos_sin is of the queries' positions, and with a separate key= those of the keys"
            " differ; give position_ids="
        )
