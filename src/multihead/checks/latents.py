"""The projections of latent attention (MLA): keys and values of all heads from one latent a token,
with a rotary key that all heads share (DeepSeek-V2 2024, section 2.1).
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .callee import Callee
from .definition import Definition, Latents, Projected
from .projections import Assignment, Matrix

NORM = re.compile(r"norm|(^|_)ln", re.IGNORECASE)
# Names of matrices as in the paper, W_DKV, W_UK, W_KR, ..., and alike.
_NAMES = {
    "kv_down": r"d_?kv|kv_?d",
    "k_up": r"u_?k|k_?u|k_up|k_b",
    "v_up": r"u_?v|v_?u|v_up|v_b",
    "k_rotary": r"k_?r|k_?rope|k_pe",
    "q_down": r"d_?q|q_?d",
    "q": r"u_?q|q_?u",
    "q_rotary": r"q_?r|q_?rope|q_pe",
}
_ROLES = {
    role: re.compile(rf"(w_?)?({names})(_?proj|_?lin(ear)?)?", re.IGNORECASE)
    for role, names in _NAMES.items()
}


@dataclass(frozen=True)
class LatentAssignment(Assignment):
    """W_UQ, W_UK, W_UV and W_O, and the matrices into latents: `down` gives the latent of keys and
    values, and the rotary key; `q_down`, if any, that of queries.

    Attributes:
        rotary_down: the columns of `down` that give the rotary key.
        definition: with the number of heads, and the width and place of their rotary part.
    """

    q_down: Matrix | None
    down: Matrix
    rotary_down: Matrix
    q_norm: nn.Module | None
    kv_norm: nn.Module | None
    definition: Definition

    def project(self, module: Any, x: Tensor, k: Tensor, v: Tensor, embed_dim: int) -> Projected:
        a = self.double()
        q_norm, kv_norm = (
            None if norm is None else copy.deepcopy(norm).double()
            for norm in (self.q_norm, self.kv_norm)
        )
        queries = x if a.q_down is None else a.q_down(x)
        latents = Latents(queries, a.down(k), a.rotary_down(k), a.q, a.k, a.v, q_norm, kv_norm)
        return Projected(queries, queries, queries, a.output, embed_dim=embed_dim, latents=latents)


def latent_assignments(
    callee: Callee, matrices: Sequence[Matrix], head_counts: Sequence[int]
) -> Iterator[LatentAssignment]:
    """The ways in which its matrices, by name, can be those of latent attention: as in DeepSeek's
    models, or with another order of the latent and the rotary key, of keys and values, or of the
    parts of a head.
    """
    unique = _find_roles(matrices)
    if not {"q", "kv", "kv_down"} <= set(unique):
        return
    q, up, down, q_down = (unique.get(role) for role in ("q", "kv", "kv_down", "q_down"))
    assert q is not None and up is not None and down is not None
    latent_dim = up.weight.shape[0]
    rotary_dim = down.weight.shape[1] - latent_dim
    width = down.weight.shape[0] if q_down is None else q_down.weight.shape[1]
    if rotary_dim < 0 or q.weight.shape[0] != width:
        return
    q_norm, kv_norm = _find_norms(callee.module, q_down, latent_dim)
    norms = {"q": q_norm, "kv": kv_norm}
    q_rotary = unique["q_rotary"].weight.shape[1] if "q_rotary" in unique else 0
    columns = torch.arange(down.weight.shape[1])
    latent_first = columns.split([latent_dim, rotary_dim])
    rotary_first = columns.split([rotary_dim, latent_dim])[::-1]
    for num_heads in head_counts:
        head_dim, rest = divmod(q.weight.shape[1], num_heads)
        ups = [] if rest else list(_split_up(up, num_heads, head_dim - rotary_dim))
        ways = [(way, latent_first, "") for way in ups]
        ways += [(way, rotary_first, ", the rotary key before the latent") for way in ups[:1]]
        for ((k, v, how), (latent, rotary), order), first in itertools.product(ways, (False, True)):
            yield LatentAssignment(
                _by_heads(q, q_rotary, num_heads) if q_rotary else q,
                k,
                v,
                unique.get("o"),
                f"from the latent of {down.name}{how}{order}",
                q_down,
                down.columns(latent, "kv_down"),
                down.columns(rotary, "kv_down"),
                q_norm,
                kv_norm,
                Definition(
                    num_heads,
                    num_heads,
                    rotary_dim=rotary_dim,
                    rotary_first=first,
                    latents=tuple(name for name, norm in norms.items() if norm is not None),
                    output="o" in unique,
                ),
            )


def _find_roles(matrices: Sequence[Matrix]) -> dict[str, Matrix]:
    """The matrices that are alone in their role; those of parts are joined: W_UK and W_UV, W_DKV
    and W_KR, W_UQ and W_QR.
    """
    by_role: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        name = re.sub(r"(\.|_)weight$", "", matrix.name).rpartition(".")[2]
        named = (role for role, pattern in _ROLES.items() if pattern.fullmatch(name))
        role = next(named, matrix.projection)
        by_role.setdefault(role or "?", []).append(matrix)
    unique = {role: found[0] for role, found in by_role.items() if len(found) == 1}
    for role, first, second in (
        ("kv", "k_up", "v_up"),
        ("kv_down", "kv_down", "k_rotary"),
        ("q", "q", "q_rotary"),
    ):
        pair = unique.get(first), unique.get(second)
        if pair[0] is not None and pair[1] is not None:
            unique[role] = _join(pair[0], pair[1])
    return unique


def _join(first: Matrix, second: Matrix) -> Matrix:
    """Both next to each other, if they take the same inputs."""
    if first.weight.shape[0] != second.weight.shape[0]:
        return first
    pair, bias = (first, second), None
    if any(matrix.bias is not None for matrix in pair):
        bias = torch.cat(
            [m.weight.new_zeros(m.weight.shape[1]) if m.bias is None else m.bias for m in pair]
        )
    return Matrix(f"{first.name} and {second.name}", torch.cat([m.weight for m in pair], 1), bias)


def _by_heads(q: Matrix, width: int, num_heads: int) -> Matrix:
    """Queries of which all rotary parts, of this width together, come last: each head's parts
    together.
    """
    parts = torch.arange(q.weight.shape[1]).split([q.weight.shape[1] - width, width])
    if any(len(part) % num_heads for part in parts):
        return q
    index = torch.cat([part.view(num_heads, -1) for part in parts], 1).flatten()
    return q.columns(index, "q")


def _split_up(up: Matrix, num_heads: int, head_dim: int) -> Iterator[tuple[Matrix, Matrix, str]]:
    """W_UK and W_UV of a matrix that holds both: of each head in turn, or one after the other."""
    columns = torch.arange(up.weight.shape[1])
    value_dim = len(columns) // num_heads - head_dim
    if len(columns) % num_heads or head_dim < 0 or value_dim < 1:
        return
    by_head = columns.view(num_heads, -1)
    width = num_heads * head_dim
    for k, v, how in (
        (by_head[:, :head_dim], by_head[:, head_dim:], ""),
        (by_head[:, value_dim:], by_head[:, :value_dim], ", values before keys"),
        (columns[:width], columns[width:], ", all keys before all values"),
    ):
        yield up.columns(k.flatten(), "k"), up.columns(v.flatten(), "v"), how


def _find_norms(
    module: nn.Module | None, q_down: Matrix | None, latent_dim: int
) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms of the latents of queries and of keys and values: by name, of the right width."""
    found: dict[str, nn.Module] = {}
    widths = {"kv": latent_dim}
    if q_down is not None:
        widths["q"] = q_down.weight.shape[1]
    for path, norm in [] if module is None else module.named_modules():
        name = path.rpartition(".")[2]
        shape = getattr(getattr(norm, "weight", None), "shape", None)
        if not NORM.search(name) or isinstance(norm, nn.Identity):
            continue
        latent = "q" if re.match("(c_)?q", name.lower()) else "kv"
        if latent in widths and (shape is None or tuple(shape) == (widths[latent],)):
            found.setdefault(latent, norm)
    return found.get("q"), found.get("kv")
