"""`Callee`: one interface to the callable under check, `callee(x)` or `callee(q, k, v)`.

Whatever its layout, dtype and arguments are, inputs and outputs of a `Callee` are float64
`[B, L, D]`, the heads concatenated where it takes them separately.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.names import NAMES, find_number
from .arguments import INPUTS, KEY_SHAPES, TABLES, MaskForm, role_of
from .signature import CannotCall, library_of

# Shapes of rotary tables.
TABLE_SHAPES = (
    "[1, L, E]",
    "[1, L, E/2]",
    "[L, E]",
    "[L, E/2]",
    "[1, 1, L, E]",
    "complex [1, L, E/2]",
)
# What an argument such as `input_pos` takes: the first position, or all of them.
START_SHAPES = ("int", "[L]", "[1, L]", "[B, L]")


@dataclass(frozen=True)
class CallSpec:
    """A call, without its inputs.

    Attributes:
        allowed: bool `[L, S]` or `[B, L, S]`, True where a query may read a key.
        valid: bool `[B, S]` (or what the padding form takes), True for real tokens.
        arguments: further arguments by name.
        start: position of the first query.
        seed: seed of torch's (and NumPy's) global generator during the call.
    """

    allowed: Tensor | None = None
    valid: Tensor | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    start: int = 0
    seed: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the call has its inputs alone."""
        return self.allowed is None and self.valid is None and not self.arguments

    def with_arguments(self, **arguments: Any) -> CallSpec:
        return replace(self, arguments={**self.arguments, **arguments})


PLAIN = CallSpec()


@dataclass
class Callee:
    """The callable under check, and the way to call it.

    Attributes:
        name: as in messages.
        function: what is called; `module` where it is an `nn.Module`.
        parameters: those of a call, by name.
        arguments: what the user gave for every call.
        layout: of its inputs: "[B, L, D]", "[L, B, D]", "[L, D]"; by heads "[B, H, L, E]",
            "[B, L, H, E]", "[B, L, E]", "[L, E]".
        form: its inputs: "self" (x alone), "cross" (q, k, v), "memory" (x and what it attends to),
            "heads" (q, k, v split into heads).
        numpy: whether it takes arrays of NumPy.
        kv_dims: widths of keys and values, where they differ from `embed_dim`.
        batch, length: sizes of the inputs that are tried.
        table_shape: shape of the rotary tables it takes.
        start_shape: what its argument of positions takes, one of `START_SHAPES`.
        weights: matrices for a function that takes its projections as arguments, by role.
        passes_tables: whether it gets rotary tables that it has defaults for.
        blank: the fill and the shape of a mask that has to be given, in a call that hides nothing,
            until its form is known; None to pass None.
        mask, padding: the form of its masks.
        causal_flag, weights_flag: arguments that switch on a causal mask, and returned weights.
        contiguous: whether inputs are made contiguous.
        changed: takes the names of inputs and masks that calls change in place, unless None; what
            is passed are copies.
    """

    name: str
    function: Callable[..., Any]
    module: nn.Module | None
    parameters: Mapping[str, inspect.Parameter]
    arguments: dict[str, Any]
    layout: str = "[B, L, D]"
    form: str = "self"
    numpy: bool = False
    embed_dim: int = 24
    num_heads: int | None = None
    num_kv_heads: int | None = None
    kv_dims: tuple[int | None, int | None] = (None, None)
    batch: int = 3
    length: int = 5
    table_shape: str = TABLE_SHAPES[0]
    start_shape: str = START_SHAPES[0]
    dtype: torch.dtype = torch.float64
    weights: dict[str, Tensor] = field(default_factory=dict)
    passes_tables: bool = True
    blank: tuple[float | bool, str] | None = None
    mask: MaskForm | None = None
    padding: MaskForm | None = None
    causal_flag: str | None = None
    weights_flag: str | None = None
    contiguous: bool = True
    changed: set[str] | None = None

    @property
    def library(self) -> str | None:
        return library_of(self.function if self.module is None else self.module)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Roles of the parameters that the user gave no value for."""
        roles = {name: role_of(name) for name in self.parameters if name not in self.arguments}
        return {name: role for name, role in roles.items() if role}

    def find_argument(self, role: str) -> str | None:
        return next((name for name, its_role in self.roles.items() if its_role == role), None)

    @property
    def unknown(self) -> list[str]:
        """Parameters that have to be given and whose role is unknown."""
        return [n for n in self.parameters if self.is_required(n) and n not in self.roles]

    def is_required(self, name: str) -> bool:
        return self.parameters[name].default is inspect.Parameter.empty

    @property
    def is_split(self) -> bool:
        """Whether it takes queries, keys and values by heads."""
        return self.form == "heads"

    @property
    def is_single(self) -> bool:
        """Whether it takes one sequence, without a batch."""
        return self.layout in ("[L, D]", "[L, E]")

    @property
    def head_dim(self) -> int:
        names = (*NAMES.rotary_dim, *NAMES.head_dim)
        return find_number(self.module, names) or self.embed_dim // (self.num_heads or 1)

    def tolerance(self) -> float:
        """Relative difference between two computations of one value: modules that round to float32
        inside stay below it.
        """
        return 1e-6 if self.dtype == torch.float64 else 1e-4

    def noise(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(shape, dtype=torch.float64).normal_(generator=generator)

    def x(
        self,
        batch: int | None = None,
        length: int | None = None,
        *,
        seed: int = 0,
        size: float = 1.0,
    ) -> Tensor:
        """Random inputs `[B, L, D]`, normal with deviation `size`."""
        shape = (batch or self.batch, length or self.length, self.embed_dim)
        return size * self.noise(*shape, seed=seed)

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a call that attends to `x`, in the widths that it takes."""
        if self.is_split and self.num_kv_heads and self.num_heads:
            if self.num_kv_heads < self.num_heads:
                x = x[..., : self.embed_dim // self.num_heads * self.num_kv_heads]
        elif self.form in ("cross", "memory"):
            k, v = (
                torch.cat([x] * -(-(n or self.embed_dim) // self.embed_dim), -1)[
                    ..., : n or self.embed_dim
                ]
                for n in self.kv_dims
            )
            return k, v
        return x, x

    def __call__(
        self, x: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, spec: CallSpec = PLAIN
    ) -> Tensor:
        """The output, float64 `[B, L, D]`."""
        return self.call_full(x, k, v, spec=spec)[0]

    def call_full(
        self, x: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, spec: CallSpec = PLAIN
    ) -> tuple[Tensor, list[Any]]:
        """The output, and a flat list of everything else that the call returned."""
        if k is None and self._needs_keys():
            keys, values = self.keys(x)
            k, v = (keys, None) if self.form == "memory" else (keys, values)
        v = k if v is None else v
        length, num_keys = x.shape[1], (x if k is None else k).shape[1]
        if spec.allowed is not None and spec.allowed.ndim == 2:
            spec = replace(spec, allowed=spec.allowed.expand(x.shape[0], -1, -1))
        if not self.is_single:
            return self._call_once((x, k, v), spec, length, num_keys)
        results = []
        for b in range(x.shape[0]):
            masks = [None if m is None else m[b : b + 1] for m in (spec.allowed, spec.valid)]
            one = replace(spec, allowed=masks[0], valid=masks[1])
            inputs = tuple(None if t is None else t[b] for t in (x, k, v))
            results.append(self._call_once(inputs, one, length, num_keys))
        return torch.stack([out[0] for out, _ in results]), results[0][1]

    def _needs_keys(self) -> bool:
        """Whether keys and values have to be passed: those with a default may be left out, if they
        are as wide as queries.
        """
        if self.form == "memory":
            return True
        required = any(
            self.parameters[name].default is not None
            for name, role in self.roles.items()
            if role in ("key", "value")
        )
        return self.form in ("cross", "heads") and (
            required or not set(self.kv_dims) <= {None, self.embed_dim}
        )

    def _call_once(
        self, inputs: tuple[Tensor | None, ...], spec: CallSpec, length: int, num_keys: int
    ) -> tuple[Tensor, list[Any]]:
        # torch.manual_seed would seed every kind of device, which takes milliseconds.
        torch.default_generator.manual_seed(spec.seed)
        if self.numpy:
            np.random.seed(spec.seed)  # noqa: NPY002 (a callee uses the global generator)
        batch = 1 if self.is_single or inputs[0] is None else inputs[0].shape[0]
        x, k, v = (t if t is None else self._to_native(t) for t in inputs)
        values = self._fill_arguments(x, k, v, (length, num_keys, spec.start), batch)
        for form, mask, role in (
            (self.mask, spec.allowed, "mask"),
            (self.padding, spec.valid, "padding"),
        ):
            if mask is None:
                continue
            if form is None:
                raise CannotCall(f"takes no {role}")
            values[form.name] = self._to_array(form.encode(mask, self.num_heads or 1, self.dtype))
        values |= spec.arguments
        given = {n: t for n, t in values.items() if self._may_change(n, t)}
        values |= {n: t.copy() if self.numpy else t.clone() for n, t in given.items()}
        positional_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
        positional = [
            name
            for name in values
            if name in self.parameters and self.parameters[name].kind in positional_kinds
        ]
        try:
            result = self.function(
                *(values[name] for name in positional),
                **{name: value for name, value in values.items() if name not in positional},
            )
        except SystemExit as error:  # with which the check would end without a verdict
            raise CannotCall(f"it ends the program (SystemExit: {error})") from error
        if self.changed is not None:
            self.changed |= {n for n, t in given.items() if _differ(values[n], t)}
        parts = list(flatten(result))
        out = self._find_output(parts, length)
        if out is None:
            raise CannotCall(f"it returned {type(result).__name__}, and no array in it")
        return self._from_native(torch.as_tensor(out), length), [t for t in parts if t is not out]

    def _may_change(self, name: str, value: Any) -> bool:
        """Whether this is an input or a mask, which a call must leave as it is."""
        is_array = isinstance(value, np.ndarray if self.numpy else Tensor)
        role = self.roles.get(name, "x")
        return is_array and self.contiguous and role in (*INPUTS, "mask", "padding")

    def _find_output(self, parts: list[Any], length: int) -> Tensor | np.ndarray | None:
        """The first array among the parts of a result, unless only a later one is as inputs are."""
        arrays = [t for t in parts if isinstance(t, Tensor | np.ndarray)]
        if len(arrays) > 1 and not self.is_split:
            axis = 0 if self.is_single or self.layout == "[L, B, D]" else 1
            for t in arrays:
                is_token_by_token = t.ndim == 3 - self.is_single and t.shape[axis] == length
                if is_token_by_token and t.shape[-1] == self.embed_dim:
                    return t
        return arrays[0] if arrays else None

    def _fill_arguments(
        self, x: Any, k: Any, v: Any, sizes: tuple[int, int, int], batch: int
    ) -> dict[str, Any]:
        """Values of the parameters: inputs, what the user gave, and sizes, tables and positions."""
        length, num_keys, start = sizes
        by_role = {"x": x, "query": x, "key": k, "value": v, "memory": k}
        values: dict[str, Any] = {}
        for name in self.parameters:
            role, required = self.roles.get(name), self.is_required(name)
            if name in self.arguments:
                values[name] = self.arguments[name]
            elif role in INPUTS and (role in ("x", "query") or by_role[role] is not None):
                values[name] = by_role[role]
            elif role and (value := self._value(role, required, length, start)) is not None:
                values[name] = value
                if role == "start" and self.start_shape != "int":
                    at = torch.arange(start, start + length)
                    shape = {"[1, L]": (1, length), "[B, L]": (batch, length)}.get(self.start_shape)
                    values[name] = self._to_array(at if shape is None else at.expand(shape))
            elif required and role in ("mask", "padding"):
                values[name] = self._open_mask(role, batch, length, num_keys)
        # Without a telling name, the first parameter is the input.
        first = next(iter(self.parameters))
        has_queries = any(self.roles.get(name) in ("x", "query") for name in values)
        if first not in values or (self.roles.get(first) in INPUTS and not has_queries):
            values[first] = x
        return values

    def _value(self, role: str, required: bool, length: int, start: int) -> Any:
        """The value for a parameter of this role; None to leave it out."""
        if role in self.weights:
            return self._to_array(self.weights[role].to(self.dtype))
        sizes = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "embed_dim": self.embed_dim,
            "head_dim": self.head_dim,
        }
        if role in sizes:
            return sizes[role] if required else None
        if role == "start":
            return start if required or start else None
        if role == "positions":
            wanted = required or (start and self.library is None)
            return self._to_array(torch.arange(start, start + length)[None]) if wanted else None
        if role == "training":
            return False if required else None
        if role in TABLES and (required or self.passes_tables):
            return self._rotary_table(role, torch.arange(start, start + length))
        return None

    def _rotary_table(self, role: str, positions: Tensor) -> Any:
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        angle = torch.outer(positions.double(), 10000.0**-pairs)
        if role == "freqs_cis" or self.table_shape.startswith("complex"):
            angle = angle if role == "freqs_cis" else angle[None]
            complex_dtype = torch.complex128 if self.dtype == torch.float64 else torch.complex64
            return self._to_array(torch.polar(torch.ones_like(angle), angle).to(complex_dtype))
        if not self.table_shape.endswith("E/2]"):
            angle = torch.cat([angle, angle], -1)
        for _ in range(self.table_shape.count("1,")):
            angle = angle[None]
        cos, sin = (self._to_array(t.to(self.dtype)) for t in (angle.cos(), angle.sin()))
        return {"cos_sin": (cos, sin), "cos": cos, "sin": sin}[role]

    def _open_mask(self, role: str, batch: int, length: int, num_keys: int) -> Any:
        """A mask that hides nothing, for a callable that requires one."""
        form = self.mask if role == "mask" else self.padding
        by_key = form is not None and form.shape in (*KEY_SHAPES, "[B]")
        if form is not None:
            queries = () if by_key else (length,)
            allowed = torch.ones(batch, *queries, num_keys, dtype=torch.bool)
            return self._to_array(form.encode(allowed, self.num_heads or 1, self.dtype))
        if self.blank is None:
            return None
        fill, layout = self.blank
        if layout == "[B]":  # the lengths of the sequences
            return self._to_array(torch.full((batch,), num_keys))
        sizes = {"B": batch, "H": self.num_heads or 1, "L": length, "S": num_keys, "1": 1}
        dtype = torch.bool if isinstance(fill, bool) else self.dtype
        full = tuple(sizes[axis] for axis in layout.strip("[]").split(", "))
        return self._to_array(torch.full(full, fill, dtype=dtype))

    def _to_array(self, t: Tensor) -> Any:
        return t.detach().numpy() if self.numpy else t

    def _to_native(self, t: Tensor) -> Any:
        t = t.to(self.dtype)
        if self.is_split and "H" in self.layout:
            t = t.unflatten(-1, (-1, self.embed_dim // (self.num_heads or 1)))
            t = t.transpose(1, 2) if self.layout == "[B, H, L, E]" else t
        t = t.transpose(0, 1) if self.layout == "[L, B, D]" else t
        return self._to_array(t.contiguous() if self.contiguous else t)

    def _from_native(self, out: Tensor, length: int) -> Tensor:
        num_axes = 2 if self.is_single else 4 if "H" in self.layout else 3
        if not out.is_floating_point() or out.ndim != num_axes:
            raise CannotCall(
                f"it returned {out.dtype} of shape {list(out.shape)} where {self.layout} was"
                " expected"
            )
        out = out.transpose(1, 2) if self.layout == "[B, H, L, E]" else out
        out = out.flatten(2) if num_axes == 4 else out[None] if num_axes == 2 else out
        out = out.transpose(0, 1) if self.layout == "[L, B, D]" else out
        if out.shape[1] != length:
            raise CannotCall(
                f"it returned {list(out.shape)}, which isn't one vector for each of {length} tokens"
            )
        return out.double()

    def copy(self, dtype: torch.dtype | None = None) -> Callee:
        """The same with a deep copy of the module, in another dtype if given."""
        copied = replace(self, dtype=dtype or self.dtype)
        if self.module is not None:
            copied.module = copied.function = copy.deepcopy(self.module)
            if dtype is not None:
                copied.module.to(dtype)
        return copied


def _differ(a: Any, b: Any) -> bool:
    """Whether two arrays differ; NaN is equal to NaN."""
    a, b = torch.as_tensor(a).detach(), torch.as_tensor(b).detach()
    return not torch.equal(a, b) and not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def flatten(result: Any) -> Iterator[Any]:
    """The parts of a result, in order, through tuples, mappings, dataclasses and namespaces.

    >>> list(flatten((1, {"a": [2, None]})))
    [1, 2, None]
    """
    if isinstance(result, Mapping):
        result = tuple(result.values())
    elif is_dataclass(result):
        result = tuple(getattr(result, part.name) for part in fields(result))
    elif isinstance(result, types.SimpleNamespace):
        result = tuple(vars(result).values())
    if isinstance(result, tuple | list):
        for part in result:
            yield from flatten(part)
    else:
        yield result
