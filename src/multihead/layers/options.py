"""Checks of the arguments of `MultiHeadAttention`'s constructor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import MultiheadError
from .position_bias import PositionBias
from .require import require_positive_int
from .rotary import Rotary

NORMS: dict[str, Callable[..., nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
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


def check_options(qk_norm: Any, gate: Any) -> None:
    is_factory = callable(qk_norm) and not isinstance(qk_norm, nn.Module)
    if qk_norm is not None and qk_norm not in NORMS and not is_factory:
        raise MultiheadError(
            f"qk_norm={qk_norm!r}: expected {', '.join(map(repr, NORMS))}, a callable that creates"
            " a module from head_dim, or None"
        )
    if gate is not None and gate not in GATES:
        raise MultiheadError(f"gate={gate!r}: expected {' or '.join(map(repr, GATES))}, or None")


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
