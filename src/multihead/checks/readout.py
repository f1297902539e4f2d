"""Read out the weights that a callable really uses, whatever its code does in between.

What W_O takes is linear in what the value projection returned: `z_i = sum_j A_hij v_j` for head h.
So `d z_i / d v_j` is A_hij for every feature of the head and 0 for all others. It is measured in
float64 by changing the values of one token: what the product with W_V returns where that can be
seen (`products`), the values themselves where they are inputs, and else W_V, by a small matrix that
changes one token alone, so that modules, functions and arrays of NumPy are read alike. z is what
W_O receives, or, where that can't be seen, the output times the pseudoinverse of W_O. Whatever
doesn't depend on the values (a residual, a bias) drops out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from .callee import PLAIN, Callee, CallSpec
from .definition import Latents, join_rotary
from .factors import FUNCTIONS, STEP, STRAY, Heads, factor_rows, name_gate, to_heads, undo_function
from .factors import CannotRead as CannotRead
from .latents import LatentAssignment
from .points import outputs_of_modules, watch_points
from .products import Numbers, Plan, Products
from .projections import Assignment, Matrix, find_matrices

MAX_PROBES = 240

# A call with inputs `[1, L, D]`, such as one in pieces with a cache.
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Readout:
    """Weights as read out of one sequence.

    Attributes:
        weights: A, float64 `[H, L, S]`.
        kv_heads: the value head that each head reads.
        spread: how much the features of one head differ in their weights, relative to them: above
            0 where there is a gate for each feature.
        queries, keys: what W_Q and W_K return, `[L, heads * E]`.
        values: what W_V returns, `[S, G * Ev]`.
        heads: what W_O takes, `[L, H * Ev]`.
        rest: the output without what the values contribute by these weights, `[L, D]`.
        output: W_O `[H * Ev, D]`; None without one.
        inputs: what W_Q takes, `[L, C]`.
        passed: steps between values and W_O that were found, as lines of the report.
        unjudged: those whose effect on the weights can't be judged.
    """

    weights: Tensor
    kv_heads: tuple[int, ...]
    spread: float
    queries: Tensor
    keys: Tensor
    values: Tensor
    heads: Tensor
    rest: Tensor
    inputs: Tensor
    output: Tensor | None = None
    passed: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()

    @cached_property
    def contributions(self) -> Tensor:
        """`A_hij v_j W_O^(h)`, `[H, L, S, D]`: what each key adds to the output of each query by
        each head; without W_O `[H, L, S, Ev]`.
        """
        num_heads, num_groups = len(self.weights), max(self.kv_heads) + 1
        v = self.values.unflatten(-1, (num_groups, -1)).transpose(0, 1)[list(self.kv_heads)]
        if self.output is not None:
            v = v @ self.output.unflatten(0, (num_heads, -1))
        return self.weights[..., None] * v[:, None]


@dataclass
class _Trace:
    """One run: inputs of W_Q, W_K and W_V; values; the heads' outputs; the output; what W_O takes.
    All are rows `[L, .]`.
    """

    taken: dict[str, Tensor]
    values: Tensor
    z: Tensor
    out: Tensor
    taken_by_output: Tensor


@dataclass
class WeightReader:
    """Reads out weights with one assignment of matrices, None where inputs are projected already,
    and one number of heads.

    Attributes:
        heads_first: whether rows of a matrix that all heads share come by head, then by token.
        use: which of several uses of W_V gives the values.
        undoes_factors: whether factors of a row, such as a gate for each feature, are undone.
        values_at: a module that values pass after W_V, such as a norm or a convolution over tokens:
            the values are what it returns.
        heads_at: a module that the heads' outputs pass before W_O: they are what it takes.

    >>> from multihead.checks.discover import find_callee
    >>> from multihead.checks.projections import assignments
    >>> with torch.no_grad():
    ...     callee = find_callee(torch.nn.MultiheadAttention(8, 2, batch_first=True), {}, None)
    ...     reader = WeightReader(callee, next(assignments(callee, [2])), 2)
    ...     weights = reader.read(callee.x(1)).weights
    >>> weights.shape, bool((weights.sum(-1) - 1).abs().max() < 1e-9)
    (torch.Size([2, 5, 5]), True)
    """

    callee: Callee
    assignment: Assignment | None
    num_heads: int
    heads_first: bool = False
    use: int = 0
    undoes_factors: bool = False
    values_at: str | None = None
    heads_at: str | None = None
    _sees_values: bool = field(default=True, init=False, repr=False)
    _plan: Plan | None = field(default=None, init=False, repr=False)
    _base: _Trace | None = field(default=None, init=False, repr=False)

    @property
    def head_dims(self) -> tuple[int, int]:
        """Widths of a head of queries and of values.

        Raises:
            CannotRead: the matrices don't divide into so many heads.
        """
        a = self.assignment
        if a is None:
            k_input, v_input = self.callee.keys(torch.zeros(1, 1, self.callee.embed_dim))
            q, k, v = self.callee.embed_dim, k_input.shape[-1], v_input.shape[-1]
        else:
            q, k, v = (m.weight.shape[1] for m in (a.q, a.k, a.v))
        head_dim = q // self.num_heads
        if isinstance(a, LatentAssignment):
            k = q
        groups = k // head_dim if head_dim else 0
        if not groups or q % self.num_heads or k % head_dim or v % groups:
            raise CannotRead(f"W_Q, W_K and W_V don't divide into {self.num_heads} heads")
        return head_dim, v // groups

    def read(
        self,
        x: Tensor,
        spec: CallSpec = PLAIN,
        run: Run | None = None,
        max_probes: int = MAX_PROBES,
    ) -> Readout:
        """The weights for `x [1, L, D]`, of the plain call unless `run` calls in another way.

        Raises:
            CannotRead: the values don't reach the output in the way of attention.
        """
        _, v_dim = self.head_dims
        changes, channels, trace, is_linear = self.measure(x, spec, run, max_probes)
        values, (passed, unjudged) = trace.values, self._steps()
        if is_linear:
            heads = self._to_heads(changes, channels)
        else:
            name, heads = undo_function(changes, channels, values, v_dim)
            values = FUNCTIONS[name](values)
            passed.append(f"values pass {name} before they are read")
        if heads.factor is not None:
            gate = self._name_gate(heads, channels, x, spec, run)
            if gate is not None:
                passed.append(f"the heads' outputs are multiplied by {gate}")
            else:
                low, high = heads.factor.min(), heads.factor.max()
                unjudged.append(
                    "whether the weights sum to one: the heads' outputs are multiplied by a factor"
                    f" of each query and feature, from {low:.3g} to {high:.3g} (a gate or a norm)"
                )
        weights = heads.weights.where(heads.weights.abs() > 1e-12, 0.0)
        read = values.unflatten(-1, (-1, v_dim))[:, list(heads.kv_heads)]
        merged = torch.einsum("hls,shd->lhd", weights, read).flatten(1)
        a = None if self.assignment is None else self.assignment.double()
        o = None if a is None or a.o is None else a.o.weight
        # With a factor, the values' part is all that W_O takes.
        part = merged if heads.factor is None and self.heads_at is None else trace.taken_by_output
        rest = trace.out - (part if o is None else part @ o)
        q, k = self._queries_and_keys(trace)
        return Readout(
            weights,
            heads.kv_heads,
            heads.spread,
            q,
            k,
            values,
            trace.z,
            rest,
            trace.taken["q"],
            o,
            tuple(passed),
            tuple(unjudged),
        )

    def _to_heads(self, changes: Tensor, channels: Sequence[int]) -> Heads:
        """As they are if they are plain, else up to a factor of each row."""
        _, v_dim = self.head_dims
        try:
            heads = to_heads(changes, channels, v_dim)
            if heads.spread < STRAY or not self.undoes_factors:
                return heads
        except CannotRead:
            if not self.undoes_factors:
                raise
        return factor_rows(changes, channels, v_dim)

    def _name_gate(
        self, heads: Heads, channels: Sequence[int], x: Tensor, spec: CallSpec, run: Run | None
    ) -> str | None:
        if self.callee.module is None or heads.factor is None:
            return None
        seen, handles = outputs_of_modules(self.callee.module)
        try:
            self._call(x, spec, run)
        finally:
            for handle in handles:
                handle.remove()
        return name_gate(heads.factor, channels, heads.kv_heads, seen, self.head_dims[1])

    def _steps(self) -> tuple[list[str], list[str]]:
        """The modules between W_V and the values that are read, and between heads and W_O: those of
        a kind that public code has there, and others.
        """
        passed: list[str] = []
        unjudged: list[str] = []
        for path, usual, words in (
            (self.values_at, "norm|conv|dropout|silu|gelu|relu", "values pass {} before they are"),
            (self.heads_at, "norm|dropout", "the heads' outputs pass {} after they are"),
        ):
            if path is not None and self.callee.module is not None:
                kind = type(self.callee.module.get_submodule(path)).__name__
                is_usual = re.search(usual, kind, re.IGNORECASE)
                line = f"{words.format(f'{path} ({kind})')} read"
                (passed if is_usual else unjudged).append(line)
        return passed, unjudged

    def measure(
        self, x: Tensor, spec: CallSpec, run: Run | None, max_probes: int = MAX_PROBES
    ) -> tuple[Tensor, Sequence[int], _Trace, bool]:
        """`d z_i / d v_jc`, `[S, C, L, H * Ev]`, the C channels c, the run without a change, and
        whether what W_O takes is linear in the values.

        Raises:
            CannotRead: what W_O takes doesn't depend on the values.
        """
        trace = self._base = self._run(x, spec, run)
        num_tokens, width = trace.values.shape
        if trace.z.shape[-1] % self.head_dims[1]:
            raise CannotRead("W_O doesn't take a multiple of the width of a head's values")
        if not trace.z.isfinite().all():
            raise CannotRead("its output isn't finite")
        # An odd step, so that it isn't in time with heads or pairs.
        channels = range(0, width, -(-width * num_tokens // max_probes) | 1)

        def changed(token: int, channel: int, size: float = 1.0) -> Tensor:
            change = torch.zeros_like(trace.values)
            change[token, channel] = size
            return self._run_changed(x, spec, run, change) - trace.z

        changes = torch.stack(
            [torch.stack([changed(j, c) for c in channels]) for j in range(num_tokens)]
        )
        largest = changes.abs().max()
        if not largest > 1e-9:
            name = "the value" if self.assignment is None else self.assignment.v.name
            raise CannotRead(f"{name} has no influence on what W_O takes")
        for j in range(num_tokens):
            twice = changed(j, channels[0], 2.0)
            if not (twice - 2 * changes[j, 0]).abs().max() <= STRAY * largest:
                break
        else:
            return changes, channels, trace, True
        if not self.undoes_factors:
            raise CannotRead("the output isn't linear in the values")
        changes = torch.stack(
            [
                torch.stack([changed(j, c, STEP) - changed(j, c, -STEP) for c in channels])
                for j in range(num_tokens)
            ]
        )
        return changes / (2 * STEP), channels, trace, False

    # ---- One run

    def _run(self, x: Tensor, spec: CallSpec, run: Run | None) -> _Trace:
        """A run without a change; notes where the products are."""
        if self.assignment is None:
            k, v = self.callee.keys(x)
            out = self.callee(x, k, v, spec=spec)[0]
            return _Trace({"q": x[0], "k": k[0], "v": v[0]}, v[0], out, out, out)
        points: dict[str, Tensor] = {}
        with Products(self._matrices) as products, self._points(points, x, None):
            out = self._call(x, spec, run)
        self._plan, seen = products.plan, products.seen
        self._sees_values = "v" in seen
        trace = self._to_trace(x, out, seen)
        return replace(trace, values=points.get("v", trace.values), z=points.get("z", trace.z))

    def _call(self, x: Tensor, spec: CallSpec, run: Run | None) -> Tensor:
        return run(x)[0] if run else self.callee(x, spec=spec)[0]

    def _points(
        self, points: dict[str, Tensor], x: Tensor, change: Tensor | None
    ) -> AbstractContextManager[None]:
        length = self.callee.keys(x)[0].shape[1], x.shape[1]
        at = self.values_at, self.heads_at
        return watch_points(self.callee.module, at, length, points, change)

    def _run_changed(self, x: Tensor, spec: CallSpec, run: Run | None, change: Tensor) -> Tensor:
        """The values that W_O takes when the values change by `change [S, W]`."""
        if self.assignment is None:
            k, v = self.callee.keys(x)
            return self.callee(x, k, v + change, spec=spec)[0]
        changes: dict[str, Tensor] = {}
        restore: Callable[[], None] | None = None
        points: dict[str, Tensor] = {}
        if self.values_at is not None:
            pass
        elif self._sees_values:
            changes["v"] = self._to_rows(change, self._matrices["v"].shape[1])
        else:
            restore = self._change_matrix(change)
        watched = {name: m for name, m in self._matrices.items() if name in ("v", "o")}
        try:
            with (
                Products(watched, changes, self._plan) as products,
                self._points(points, x, change),
            ):
                out = self._call(x, spec, run)
        finally:
            if restore is not None:
                restore()
        return points["z"] if "z" in points else self._find_z(out, products.seen)

    def run_changed(self, x: Tensor, changes: Mapping[str, Tensor]) -> Tensor:
        """The values that W_O takes, `[L, H * Ev]`, when products change: "q in", "k in" and "v"
        `[L, .]`.

        Raises:
            CannotRead: one of these isn't a product by itself, whose result is used as it is.
        """
        a = self.assignment
        is_plain = a is not None and not isinstance(a, LatentAssignment) and self._sees_values
        if a is None or not is_plain or self.values_at or self.heads_at or self.use:
            raise CannotRead("queries, keys and values aren't plain products")
        if any(m.parts or m.shared is not None for m in (a.q, a.k, a.v)):
            raise CannotRead("projections are products of several matrices, or shared by heads")
        watched = {name: m for name, m in self._matrices.items() if name in (*changes, "o")}
        with Products(watched, changes, self._plan) as products:
            out = self._call(x, PLAIN, None)
        return self._find_z(out, products.seen)

    def _find_z(self, out: Tensor, seen: dict[str, Tensor]) -> Tensor:
        assert self.assignment is not None
        o = self.assignment.o
        if o is None:
            return out
        if "o" in seen and len(seen["o"]) == len(out):
            return seen["o"]
        return _undo(out, o)

    @cached_property
    def _matrices(self) -> dict[str, Numbers]:
        """The matrices whose products are watched."""
        a = self.assignment
        assert a is not None
        matrices = {
            "q in": _first_factor(a.q),
            "k in": _first_factor(a.k),
            "v in": _first_factor(a.v),
            "v": _last_factor(a.v),
        }
        if a.o is not None:
            matrices["o"] = a.o.weight
        if isinstance(a, LatentAssignment):
            matrices["rotary"] = a.rotary_down.weight
        return {name: Numbers(matrix) for name, matrix in matrices.items() if matrix.numel()}

    def _to_trace(self, x: Tensor, out: Tensor, seen: dict[str, Tensor]) -> _Trace:
        a = self.assignment
        assert a is not None
        keys, values = self.callee.keys(x)
        taken = {}
        for who, matrix, direct in (("q", a.q, x), ("k", a.k, keys), ("v", a.v, values)):
            rows, in_dim = direct[0], (matrix.parts or (matrix,))[0].weight.shape[0]
            if f"{who} in" in seen:
                rows = self._from_rows(seen[f"{who} in"], in_dim, direct.shape[1])
            if rows.shape[1] != in_dim:
                raise CannotRead(f"{matrix.name} takes something else than the inputs")
            taken[who] = rows
        if "rotary" in seen:
            taken["rotary"] = seen["rotary"]
        z = self._find_z(out, seen)
        return _Trace(taken, a.double().v(taken["v"]), z, out, z)

    def read_queries_and_keys(self, x: Tensor, spec: CallSpec = PLAIN) -> tuple[Tensor, Tensor]:
        """The outputs of W_Q and W_K, `[L, heads * E]`."""
        return self._queries_and_keys(self._run(x, spec, None))

    def _queries_and_keys(self, trace: _Trace) -> tuple[Tensor, Tensor]:
        if self.assignment is None:
            return trace.taken["q"], trace.taken["k"]
        a = self.assignment.double()
        q, k = a.q(trace.taken["q"]), a.k(trace.taken["k"])
        if isinstance(a, LatentAssignment) and "rotary" in trace.taken:
            rotary, none = a.rotary_down(trace.taken["rotary"]), torch.zeros(0)
            latents = Latents(none, none, rotary[None], a.q, a.k, a.v)
            k = join_rotary(k[None], latents, a.definition)[0]
        return q, k

    # ---- Rows of products: tokens, or tokens and heads where all heads share a matrix

    def _to_rows(self, t: Tensor, width: int) -> Tensor:
        """`[S, W]` as the rows of a product that is `width` wide, after those of earlier uses."""
        if t.shape[1] != width:
            t = t.unflatten(-1, (-1, width))
            t = (t.transpose(0, 1) if self.heads_first else t).flatten(0, 1)
        return torch.cat([t.new_zeros(self.use * len(t), width), t])

    def _from_rows(self, t: Tensor, width: int, length: int) -> Tensor:
        """Rows of a product, `[S, W]` or by head, as `[S, width]`."""
        copies = width // t.shape[1]
        num_rows = copies * length
        if len(t) > num_rows and len(t) % num_rows == 0:
            t = t[self.use * num_rows :][:num_rows]
        if copies == 1:
            return t
        if len(t) % copies:
            raise CannotRead("a matrix that heads share is used in an unknown way")
        t = t.unflatten(0, (copies, -1) if self.heads_first else (-1, copies))
        return (t.transpose(0, 1) if self.heads_first else t).flatten(1)

    def _change_matrix(self, change: Tensor) -> Callable[[], None]:
        """Change W_V so that its products change by `change [S, width]`; returns what undoes it.

        Raises:
            CannotRead: there are more tokens than independent inputs, or W_V is out of reach.
        """
        assert self.assignment is not None and self._base is not None
        v, u = self.assignment.v, self._base.taken["v"]
        if v.parts is not None:
            first, v = v.parts
            u = first.double()(u)
        if torch.linalg.matrix_rank(u) < len(u):
            raise CannotRead(f"{len(u)} tokens are more than the width of the values' input")
        target = find_target(self.callee, v)
        before = target.clone()
        columns = torch.arange(v.weight.shape[1]) if v.index is None else v.index
        target[:, columns] += (torch.linalg.pinv(u) @ change).to(target)

        def restore() -> None:
            target.copy_(before)

        return restore


def _first_factor(matrix: Matrix) -> Tensor:
    """The matrix that takes the inputs: of a product, or the one that heads share."""
    matrix = matrix.parts[0] if matrix.parts else matrix
    return matrix.weight if matrix.shared is None else matrix.shared


def _last_factor(matrix: Matrix) -> Tensor:
    return matrix.parts[1].weight if matrix.parts else _first_factor(matrix)


def find_target(callee: Callee, matrix: Matrix) -> Tensor:
    """The matrix that the callable multiplies with, to be changed in place.

    Raises:
        CannotRead: it is made of several, or only a copy of it can be had.
    """
    fused = next((m for m in find_matrices(callee) if m.name == matrix.name), None)
    if fused is None or fused.shared is not None:
        raise CannotRead(f"{matrix.name} can't be changed")
    return (matrix.weight if matrix.index is None else fused.weight).detach()


def _undo(out: Tensor, o: Matrix) -> Tensor:
    """The values that W_O took, up to what doesn't depend on it.

    Raises:
        CannotRead: W_O loses some of it.
    """
    weight = o.weight.detach().double()
    if out.shape[-1] != weight.shape[1] or torch.linalg.matrix_rank(weight) < weight.shape[0]:
        raise CannotRead(f"what {o.name} takes can't be derived from the output")
    return out @ torch.linalg.pinv(weight)
