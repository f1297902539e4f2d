"""W_Q, W_K, W_V and W_O of a module, by name where names tell, and else by shape, in every way that
is possible.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..models.names import projection_role
from .callee import Callee
from .definition import Projected

LOW_RANK = re.compile(r"[._]?(down|up|a|b|0|1|2)(_proj)?$")
MAX_MATRICES, MAX_BY_SHAPE = 6, 60  # that are tried as W_Q, W_K, W_V; assignments by shape


@dataclass(frozen=True)
class Matrix:
    """A matrix `[in, out]` that a callable multiplies with, and its bias `[out]`."""

    name: str
    weight: Tensor
    bias: Tensor | None = None
    num_heads: int | None = None  # where its shape tells
    projection: str | None = None
    index: Tensor | None = None  # the columns of the fused matrix of this name that it consists of
    parts: tuple[Matrix, Matrix] | None = None  # the factors, of a product of low rank
    shared: Tensor | None = None  # the matrix that all heads share, of which this is made

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else x @ self.weight + self.bias

    def columns(self, index: Tensor, projection: str) -> Matrix:
        bias = None if self.bias is None else self.bias[index]
        part = self.weight[:, index]
        return replace(self, weight=part, bias=bias, projection=projection, index=index)

    def double(self) -> Matrix:
        bias = None if self.bias is None else self.bias.detach().double()
        parts = self.parts and (self.parts[0].double(), self.parts[1].double())
        return replace(self, weight=self.weight.detach().double(), bias=bias, parts=parts)

    @property
    def is_square(self) -> bool:
        return self.weight.shape[0] == self.weight.shape[1]


@dataclass(frozen=True)
class Assignment:
    """Matrices taken as W_Q, W_K, W_V and W_O; `how` unless that is by name."""

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix | None
    how: str

    @property
    def description(self) -> str:
        parts = {"W_Q": self.q, "W_K": self.k, "W_V": self.v, "W_O": self.o}
        named = ", ".join(f"{n} is {m.name}" for n, m in parts.items() if m is not None)
        return f"{named} ({self.how})" if self.how else named

    @property
    def fits(self) -> bool:
        """Whether W_O takes a multiple of the width of the values."""
        return self.o is None or self.o.weight.shape[0] % (self.v.weight.shape[1] or 1) == 0

    def double(self) -> Self:
        """The same in float64."""
        matrices: dict[str, Any] = {
            field.name: value.double()
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Matrix)
        }
        return replace(self, **matrices)

    def project(self, module: Any, x: Tensor, k: Tensor, v: Tensor, embed_dim: int) -> Projected:
        """Queries of x `[B, L, D]`, keys of `k` and values of `v`, in float64."""
        a = self.double()
        q_norm, k_norm = (
            None if norm is None else copy.deepcopy(norm).double() for norm in find_norms(module)
        )
        return Projected(a.q(x), a.k(k), a.v(v), a.output, q_norm, k_norm, embed_dim)

    @property
    def output(self) -> tuple[Tensor, Tensor | None] | None:
        """W_O and its bias."""
        return None if self.o is None else (self.o.weight, self.o.bias)


def projection_of_path(path: str) -> str | None:
    """The projection that a parameter's path names: "q", "k", "v", "o", "qkv", "kv" or None.

    >>> projection_of_path("layers.0.attn.q_proj.weight"), projection_of_path("mlp.up")
    ('q', None)
    """
    path = re.sub(r"\.(weight|kernel)$|_weight$|_kernel$", "", path.lower().replace("/", "."))
    for part in reversed(path.split(".")):
        if part.isdigit() or part in ("*", "weight", "kernel"):
            continue
        if (role := projection_role(part)) is not None:
            return "o" if role == "out" else role
    return None


# ---- The matrices of a callable


def find_matrices(callee: Callee) -> list[Matrix]:
    """All matrices of a module, function or object, each as `[in, out]`."""
    if callee.module is None:
        return _matrices_of_function(callee)
    matrices: dict[str, Matrix] = {}
    for path, module in callee.module.named_modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if type(module).__name__ == "Conv1D":  # transformers' linear layer
            matrices[path] = Matrix(path, module.weight, module.bias)
        elif isinstance(weight, Tensor) and hasattr(module, "in_features"):
            if weight.ndim == 2:
                matrices[path] = Matrix(path, weight.T, bias)
        elif isinstance(module, nn.Conv1d) and module.kernel_size == (1,):
            matrices[path] = Matrix(path, module.weight[..., 0].T, module.bias)
        elif not isinstance(module, nn.Embedding):
            parameters = {n: p.detach() for n, p in module.named_parameters(recurse=False)}
            for name, parameter in parameters.items():
                if parameter.ndim >= 2 and not re.search(r"bias|^b_?[qkvo]", name):
                    full = f"{path}.{name}".lstrip(".")
                    if tuple(parameter.shape) == (4, callee.embed_dim, callee.embed_dim):
                        # One parameter that holds W_Q, W_K, W_V and W_O in some order.
                        matrices |= {
                            f"{full}[{n}]": Matrix(f"{full}[{n}]", p)
                            for n, p in enumerate(parameter)
                        }
                        continue
                    matrices[full] = _to_matrix(full, parameter, parameters, callee.embed_dim)
    return [_repeat_shared(m, callee) for m in _join_heads(matrices)]


def _matrices_of_function(callee: Callee) -> list[Matrix]:
    """Of a function the matrices that are passed to it; of an object its arrays."""
    if callee.weights:
        return [
            Matrix(
                callee.find_argument(role) or role,
                weight,
                callee.weights.get(role.replace("weight", "bias")),
                projection=role.split()[0],
            )
            for role, weight in callee.weights.items()
            if role.endswith("weight")
        ]
    owner = getattr(callee.function, "__self__", callee.function)
    arrays = {
        name: torch.as_tensor(array)
        for name, array in getattr(owner, "__dict__", {}).items()
        if isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating)
    }
    matrices = {
        name: _to_matrix(name, array, arrays, callee.embed_dim)
        for name, array in arrays.items()
        if array.ndim >= 2
    }
    return _join_heads(matrices)


def _to_matrix(name: str, p: Tensor, others: dict[str, Tensor], embed_dim: int) -> Matrix:
    """A parameter as a matrix `[in, out]`, with the bias that its name suggests."""
    last = name.rpartition(".")[2]
    bias_names = (
        last.replace("weight", "bias"),
        re.sub(r"^[wW]", "b", last),
        re.sub(r"^[wW]_?", "bias_", last),
        last.replace("kernel", "bias"),
        f"{last}_bias",
    )
    bias = next((others[b] for b in bias_names if b != last and b in others), None)
    num_heads, projection = None, projection_of_path(name)
    if last in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight"):
        weight = p.T  # nn.MultiheadAttention's, always for F.linear
        if "in_proj_bias" in others and last != "in_proj_weight":
            bias = others["in_proj_bias"].chunk(3)["qkv".index(last[0])]
    elif p.ndim == 2:
        is_square, takes_inputs_last = p.shape[0] == p.shape[1], p.shape[1] == embed_dim
        # As F.linear has a square weight; the transpose is tried too.
        transposed = last.endswith("weight") and (is_square or takes_inputs_last)
        weight = p.T if transposed else p
    elif p.ndim == 3 and projection == "o":
        is_output_last = p.shape[2] == embed_dim or p.shape[0] != embed_dim  # else [D, H, E]
        weight = p.flatten(0, 1) if is_output_last else p.permute(1, 2, 0).flatten(0, 1)
        num_heads = p.shape[0] if is_output_last else p.shape[1]
    elif p.ndim == 3 and p.shape[0] == embed_dim:  # [D, H, E]
        weight, num_heads = p.flatten(1), p.shape[1]
    elif p.ndim == 3:  # [H, D, E], [H, E, D]
        order = (1, 0, 2) if p.shape[1] == embed_dim else (2, 0, 1)
        weight, num_heads = p.permute(order).flatten(1), p.shape[0]
    else:
        axis = next((a for a in range(p.ndim) if p.shape[a] == embed_dim), 0)
        weight = p.movedim(axis, 0).flatten(1)
    return Matrix(name, weight, None if bias is None else bias.flatten(), num_heads, projection)


def _join_heads(matrices: dict[str, Matrix]) -> list[Matrix]:
    """Concatenate matrices of heads that are separate modules, `heads.0.query` and so on."""
    groups: dict[str, list[Matrix]] = {}
    for name, matrix in matrices.items():
        groups.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), []).append(matrix)
    joined = []
    for name, members in groups.items():
        one_shape = len({m.weight.shape for m in members}) == 1
        # Square ones without a name may be W_Q, W_K, W_V and W_O rather than heads.
        is_square = members[0].is_square
        is_unnamed = name.endswith("*") and is_square and not projection_of_path(name)
        if len(members) == 1 or "*" not in name or not one_shape or is_unnamed:
            joined += members
            continue
        biases = [m.bias for m in members if m.bias is not None]
        bias = torch.cat(biases) if len(biases) == len(members) else None
        joined.append(Matrix(name, torch.cat([m.weight for m in members], 1), bias, len(members)))
    return [
        m if m.projection else replace(m, projection=projection_of_path(m.name)) for m in joined
    ]


def _repeat_shared(matrix: Matrix, callee: Callee) -> Matrix:
    """One matrix [E, E] that all heads share, as the block diagonal one that it amounts to."""
    rows, columns = matrix.weight.shape
    heads = callee.num_heads or 1
    is_shared = rows == columns and heads > 1 and rows * heads == callee.embed_dim
    if not is_shared or matrix.projection == "o":
        return matrix
    weight = torch.block_diag(*[matrix.weight] * heads)
    bias = None if matrix.bias is None else matrix.bias.repeat(heads)
    return replace(matrix, weight=weight, bias=bias, num_heads=heads, shared=matrix.weight)


def find_norms(module: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Norms of queries and keys, by name."""

    def find(x: str, word: str) -> nn.Module | None:
        names = (f"{x}_norm", f"norm_{x}", f"{x}_ln", f"{x}_layernorm", f"{word}_norm")
        modules = (getattr(module, name, None) for name in names)
        real = (m for m in modules if isinstance(m, nn.Module) and not isinstance(m, nn.Identity))
        return next(real, None)

    return find("q", "query"), find("k", "key")


# ---- Which matrix is which


def assignments(callee: Callee, head_counts: Sequence[int]) -> Iterator[Assignment]:
    """Every way in which its matrices can be W_Q, W_K, W_V and W_O, the most plausible first."""
    matrices = [m for m in find_matrices(callee) if m.weight.is_floating_point()]
    matrices = _multiply_out(matrices)
    by_name: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        by_name.setdefault(matrix.projection or "?", []).append(matrix)
    unique = {who: ms[0] for who, ms in by_name.items() if len(ms) == 1 and who != "?"}
    o = unique.get("o")
    has_names = False
    if {"q", "k", "v"} <= set(unique):
        yield from _with_transposes(Assignment(unique["q"], unique["k"], unique["v"], o, ""))
        has_names = True
    if {"q", "kv"} <= set(unique):
        fused, width = unique["kv"], unique["kv"].weight.shape[1]
        for index, how in _part_columns(width, 2, head_counts):
            for order in ("kv", "vk"):
                part = {who: fused.columns(index[n], who) for n, who in enumerate(order)}
                how_fused = f"fused as {', '.join(order)}{how}"
                yield Assignment(unique["q"], part["k"], part["v"], o, how_fused)
        has_names = True
    if "qkv" in unique:
        yield from _assign_fused(unique["qkv"], o, callee.embed_dim, head_counts)
        has_names = True
    if not has_names or o is None:
        yield from _assign_by_shape(matrices, callee.embed_dim, head_counts)


def _multiply_out(matrices: list[Matrix]) -> list[Matrix]:
    """Two matrices of low rank, `q_down` and `q_up`, as the one that they amount to."""
    groups: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        groups.setdefault(LOW_RANK.sub("", matrix.name), []).append(matrix)
    joined = []
    for name, members in groups.items():
        projection = projection_of_path(name)
        if len(members) == 2 and projection is not None:
            a, b = sorted(members, key=lambda m: m.weight.shape[1])
            if a.weight.shape[1] == b.weight.shape[0] < min(a.weight.shape[0], b.weight.shape[1]):
                bias = b.bias if a.bias is None else b(a.bias)
                names = f"{a.name} times {b.name}"
                joined.append(
                    Matrix(names, a.weight @ b.weight, bias, None, projection, parts=(a, b))
                )
                continue
        joined += members
    return joined


def _with_transposes(assignment: Assignment) -> Iterator[Assignment]:
    """The assignment, and with all matrices transposed: a square parameter doesn't tell which way
    it multiplies.
    """
    yield assignment
    matrices = [assignment.q, assignment.k, assignment.v, assignment.o]
    if all(m is None or m.is_square for m in matrices):
        q, k, v, *o = (replace(m, weight=m.weight.T) for m in matrices if m is not None)
        yield Assignment(q, k, v, o[0] if o else None, "transposed")


def _part_columns(
    width: int, parts: int, head_counts: Iterable[int]
) -> Iterator[tuple[list[Tensor], str]]:
    """Columns of each part of a fused matrix: in blocks, [H, parts, E], [H, E, parts],
    [E, parts, H].
    """
    if width % parts:
        return
    columns = torch.arange(width)
    yield list(columns.view(parts, -1)), ""
    for heads in head_counts:
        if width % (parts * heads):
            continue
        by_head, by_feature = columns.view(heads, parts, -1), columns.view(heads, -1, parts)
        heads_last = columns.view(-1, parts, heads)
        n = range(parts)
        yield [by_head[:, i].flatten() for i in n], f", of each of {heads} heads in turn"
        yield [by_feature[..., i].flatten() for i in n], f", interleaved in {heads} heads"
        yield [heads_last[:, i].T.flatten() for i in n], f", as [E, {parts}, {heads}]"


def _assign_fused(
    fused: Matrix, o: Matrix | None, embed_dim: int, head_counts: Sequence[int]
) -> Iterator[Assignment]:
    width = fused.weight.shape[1]
    inner = o.weight.shape[0] if o is not None else embed_dim
    if o is None or width == 3 * inner:
        for index, how in _part_columns(width, 3, head_counts):
            for order in itertools.permutations("qkv"):
                part = {who: fused.columns(index[n], who) for n, who in enumerate(order)}
                how_fused = f"fused as {', '.join(order)}{how}"
                yield Assignment(part["q"], part["k"], part["v"], o, how_fused)
    elif width > inner and (width - inner) % 2 == 0:  # fewer key/value heads
        columns, kv_width = torch.arange(width), (width - inner) // 2
        first, second, third = (
            fused.columns(part, "fused") for part in columns.split([inner, kv_width, kv_width])
        )
        yield Assignment(first, second, third, o, "fused as q, k, v")
        yield Assignment(first, third, second, o, "fused as q, v, k")
        for heads in head_counts:
            head_dim = inner // heads
            if not head_dim or inner % heads or kv_width % head_dim:
                continue
            groups = kv_width // head_dim
            if heads % groups:
                continue
            grid = columns.view(groups, heads // groups + 2, head_dim)
            parts = (grid[:, :-2], grid[:, -2], grid[:, -1])
            q, k, v = (fused.columns(part.flatten(), "fused") for part in parts)
            yield Assignment(q, k, v, o, f"fused as q, k, v, of each of {groups} groups in turn")


def _assign_by_shape(
    matrices: list[Matrix], embed_dim: int, head_counts: Sequence[int]
) -> Iterator[Assignment]:
    """Matrices that take the inputs are W_Q, W_K, W_V in some order, or all in one; one that takes
    their outputs is W_O.
    """
    takes_inputs = [m for m in matrices if m.weight.shape[0] == embed_dim][:MAX_MATRICES]
    tried = 0
    for q, k, v in itertools.permutations(takes_inputs, 3):
        if k.weight.shape != v.weight.shape:
            continue
        others = [m for m in matrices if m is not q and m is not k and m is not v]
        outputs: list[Matrix | None] = [m for m in others if m.weight.shape[0] == q.weight.shape[1]]
        for o in outputs[:2] or [None]:
            tried += 1
            if tried <= MAX_BY_SHAPE:
                yield from _with_transposes(Assignment(q, k, v, o, "by shape"))
    for fused in takes_inputs:
        others = [m for m in matrices if m is not fused]
        fused_outputs: list[Matrix | None] = [
            m for m in others if m.weight.shape[0] < fused.weight.shape[1]
        ]
        for o in fused_outputs[:2] or [None]:
            yield from _assign_fused(fused, o, embed_dim, head_counts)


def possible_head_counts(callee: Callee, stated: int | None, matrices: list[Matrix]) -> list[int]:
    """Numbers of heads: as stated, or as shapes tell, or every divisor of the width."""
    if stated:
        return [stated]
    by_shape = {m.num_heads for m in matrices if m.num_heads}
    if by_shape:
        return sorted(by_shape, reverse=True)
    width = callee.embed_dim
    return [n for n in range(1, min(width, 64) + 1) if width % n == 0]
