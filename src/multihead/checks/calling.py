"""How the thing under check is called: one adapter, `subject(x)` or `subject(q, k, v)`, whatever is
behind it.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.names import NAMES, find_number
from .arguments import MaskForm, role_of

LIBRARIES = ("torch", "transformers", "timm", "keras", "multihead")
TABLES = ("[1, L, E]", "[1, L, E/2]", "[L, E]", "[L, E/2]", "[1, 1, L, E]", "complex [1, L, E/2]")
INPUTS = ("x", "query", "key", "value", "memory")


class Unable(ValueError):
    """It can't be called, or not like that; the words say what is missing."""


@dataclass
class Subject:
    """The thing under check. Inputs and output are float64 `[B, L, width]`, heads side by side
    where it takes them apart.
    """

    name: str
    function: Callable[..., Any]
    module: nn.Module | None
    parameters: Mapping[str, inspect.Parameter]
    given: dict[str, Any]
    # or [L, B, D], [L, D], and of inputs by heads [B, H, L, E], [B, L, H, E], [B, L, E], [L, E]
    layout: str = "[B, L, D]"
    # x alone, "cross": q, k, v, "memory": x and what it reads, "heads": q, k, v by heads
    form: str = "self"
    numpy: bool = False
    width: int = 24
    heads: int | None = None
    groups: int | None = None
    key_widths: tuple[int | None, int | None] = (
        None,
        None,
    )  # of keys and values that aren't as wide as queries
    batch: int = 3
    length: int = 5
    table: str = TABLES[0]
    dtype: torch.dtype = torch.float64
    weights: dict[str, Tensor] = field(default_factory=dict)  # of a function that takes them
    blank: str | None = None  # how to say "no mask" to one that demands a mask
    filled: bool = True  # whether rotary tables that it could do without are given
    mask: MaskForm | None = None
    padding: MaskForm | None = None
    causal_flag: str | None = None
    weights_flag: str | None = None
    contiguous: bool = True  # inputs lie in memory in order

    @property
    def library(self) -> str | None:
        of = self.module if self.module is not None else self.function
        module = (
            getattr(of, "__module__", None)
            if isinstance(of, types.FunctionType)
            else type(of).__module__
        )
        top = (module or "").partition(".")[0]
        return top if top in LIBRARIES else None

    @property
    def roles(self) -> dict[str, str]:
        return {
            name: role
            for name in self.parameters
            if (role := role_of(name)) and name not in self.given
        }

    def named(self, role: str) -> str | None:
        return next((name for name, its in self.roles.items() if its == role), None)

    @property
    def split(self) -> bool:
        return self.form == "heads"

    def tolerance(self) -> float:
        """Of what was computed twice; noise of modules that turn to float32 inside is below it."""
        return 1e-6 if self.dtype == torch.float64 else 1e-4

    def noise(self, *shape: int, seed: int = 0) -> Tensor:
        return torch.empty(shape, dtype=torch.float64).normal_(
            generator=torch.Generator().manual_seed(seed)
        )

    def x(
        self,
        batch: int | None = None,
        length: int | None = None,
        *,
        seed: int = 0,
        size: float = 1.0,
    ) -> Tensor:
        return size * self.noise(batch or self.batch, length or self.length, self.width, seed=seed)

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What stands for keys and values where it attends to `x`: with fewer key/value heads, the
        part that they need.
        """
        if self.split and self.groups and self.heads and self.groups < self.heads:
            x = x[..., : self.width // self.heads * self.groups]
        if self.form in ("cross", "memory"):
            k, v = (
                torch.cat([x] * -(-(n or self.width) // self.width), -1)[..., : n or self.width]
                for n in self.key_widths
            )
            return k, v
        return x, x

    def __call__(
        self,
        x: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        may: Tensor | None = None,
        valid: Tensor | None = None,
        more: Mapping[str, Any] | None = None,
        start: int = 0,
        seed: int = 1,
    ) -> Tensor:
        """`may` [L, S] or [B, L, S], True where a row reads; `valid` [B, S], True where a token is
        real.
        """
        return self.everything(x, k, v, may=may, valid=valid, more=more, start=start, seed=seed)[0]

    def everything(
        self,
        x: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        may: Tensor | None = None,
        valid: Tensor | None = None,
        more: Mapping[str, Any] | None = None,
        start: int = 0,
        seed: int = 1,
    ) -> tuple[Tensor, list[Any]]:
        """The output, and what else was returned."""
        optional = all(
            self.parameters[n].default is None
            for n, role in self.roles.items()
            if role in ("key", "value")
        )
        if (
            k is None
            and self.form in ("cross", "heads")
            and not (optional and set(self.key_widths) <= {None, self.width})
        ):
            k, v = self.keys(x)
        k = self.keys(x)[0] if k is None and self.form == "memory" else k
        v = k if v is None else v
        batch, length, keys = x.shape[0], x.shape[1], (x if k is None else k).shape[1]
        if may is not None and may.ndim == 2:
            may = may.expand(batch, -1, -1)
        if self.layout.startswith("[L, D") or self.layout == "[L, E]":
            parts = [
                self._one(
                    [t if t is None else t[b] for t in (x, k, v)],
                    [m if m is None else m[b : b + 1] for m in (may, valid)],
                    more,
                    start,
                    seed,
                    length,
                    keys,
                )
                for b in range(batch)
            ]
            return torch.stack([out[0] for out, _ in parts]), parts[0][1]
        out, rest = self._one([x, k, v], [may, valid], more, start, seed, length, keys)
        return out, rest

    def _one(
        self,
        inputs: list[Tensor | None],
        masks: list[Tensor | None],
        more: Mapping[str, Any] | None,
        start: int,
        seed: int,
        length: int,
        keys: int,
    ) -> tuple[Tensor, list[Any]]:
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed would ask every kind of device, and take milliseconds
        if self.numpy:
            np.random.seed(seed)  # noqa: NPY002 (the callee's generator is the global one)
        x, k, v = (t if t is None else self._native(t) for t in inputs)
        values: dict[str, Any] = {}
        by_role = {"x": x, "query": x, "key": k, "value": v, "memory": k}
        for name, parameter in self.parameters.items():
            role, required = self.roles.get(name), parameter.default is parameter.empty
            if name in self.given:
                values[name] = self.given[name]
            elif role in INPUTS and (role in ("x", "query") or by_role[role] is not None):
                values[name] = by_role[role]
            elif (
                role is not None
                and (value := self._value(role, required, length, keys, start)) is not None
            ):
                values[name] = value
            elif required and role in ("mask", "padding"):
                values[name] = self._no_mask(role, length, keys)
        # An input that no name tells is the first parameter.
        first = next(iter(self.parameters))
        if first not in values or self.roles.get(first) in ("key", "value", "memory"):
            values[first] = x
        for form, m, role in ((self.mask, masks[0], "mask"), (self.padding, masks[1], "padding")):
            if m is not None:
                if form is None:
                    raise Unable(f"takes no {role}")
                values[form.name] = self._array(form.of(m, self.heads or 1, self.dtype))
        values.update(more or {})
        positional, keyword = [], {}
        for name, value in values.items():
            kind = (
                self.parameters[name].kind
                if name in self.parameters
                else inspect.Parameter.KEYWORD_ONLY
            )
            if kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
                positional.append(value)
            else:
                keyword[name] = value
        result = self.function(*positional, **keyword)
        flat = list(_flatten(result))
        out = next((t for t in flat if isinstance(t, Tensor | np.ndarray)), None)
        if out is None:
            raise Unable(f"it returned {type(result).__name__}, and no array in it")
        return self._back(torch.as_tensor(out), length), [t for t in flat if t is not out]

    def _array(self, t: Tensor) -> Any:
        return t.detach().numpy() if self.numpy else t

    def _native(self, t: Tensor) -> Any:
        t = t.to(self.dtype)
        if self.split and self.layout in ("[B, H, L, E]", "[B, L, H, E]"):
            assert self.heads
            t = t.unflatten(-1, (-1, self.width // self.heads))
            t = t.transpose(1, 2) if self.layout == "[B, H, L, E]" else t
        t = t.transpose(0, 1) if self.layout == "[L, B, D]" else t
        return self._array(t.contiguous() if self.contiguous else t)

    def _back(self, out: Tensor, length: int) -> Tensor:
        want = {"[L, D]": 2, "[L, E]": 2}.get(self.layout, 4 if "H" in self.layout else 3)
        if not out.is_floating_point() or out.ndim != want:
            raise Unable(
                f"it returned {out.dtype} of shape {list(out.shape)} where {self.layout} was"
                " expected"
            )
        if self.layout == "[B, H, L, E]":
            out = out.transpose(1, 2)
        out = out.flatten(2) if want == 4 else out[None] if want == 2 else out
        out = out.transpose(0, 1) if self.layout == "[L, B, D]" else out
        if out.shape[1] != length:
            raise Unable(
                f"it returned {list(out.shape)}, which has no row for each of {length} tokens"
            )
        return out.double()

    def _no_mask(self, role: str, length: int, keys: int) -> Any:
        form = self.mask if role == "mask" else self.padding
        may = torch.ones(
            (1, length, keys) if role == "mask" else (self.batch, keys), dtype=torch.bool
        )
        if form is not None:
            return self._array(form.of(may, self.heads or 1, self.dtype))
        return None if self.blank is None else self._array(may[0] if role == "mask" else may)

    @property
    def head_dim(self) -> int:
        names = ("qk_rope_head_dim", *NAMES.head_dim)
        return find_number(self.module, names) or self.width // (self.heads or 1)

    def _value(self, role: str, required: bool, length: int, keys: int, start: int) -> Any:
        if role in self.weights:
            return self._array(self.weights[role].to(self.dtype))
        sizes = {
            "heads": self.heads,
            "kv_heads": self.groups or self.heads,
            "width": self.width,
            "head_dim": self.head_dim,
        }
        if role in sizes:
            return sizes[role] if required else None
        at = torch.arange(start, start + length)
        if role == "start":
            return start if required or start else None
        if role == "positions":
            return self._array(at[None]) if required or (start and self.library is None) else None
        if role == "training":
            return False if required else None
        if role in ("tables", "cos", "sin", "turns") and (required or self.filled):
            half = torch.outer(
                at.double(),
                10000.0
                ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim),
            )
            if role == "turns" or self.table.startswith("complex"):
                half = half if role == "turns" else half[None]
                return self._array(
                    torch.polar(torch.ones_like(half), half).to(
                        torch.complex128 if self.dtype == torch.float64 else torch.complex64
                    )
                )
            angle = half if self.table.endswith("E/2]") else torch.cat([half, half], -1)
            for _ in range(self.table.count("1,")):
                angle = angle[None]
            cos, sin = (self._array(t.to(self.dtype)) for t in (angle.cos(), angle.sin()))
            return {"tables": (cos, sin), "cos": cos, "sin": sin}[role]
        return None

    def copy(self, dtype: torch.dtype | None = None) -> Subject:
        """With a module of its own, in another dtype if given."""
        found = replace(self, dtype=dtype or self.dtype)
        if self.module is not None:
            found.module = copy.deepcopy(self.module)
            found.function = found.module
            if dtype is not None:
                found.module.to(dtype)
        return found


def _flatten(result: Any) -> Iterator[Any]:
    """What a call returned, in order, through tuples, mappings and transformers' outputs."""
    if isinstance(result, Mapping):
        result = tuple(result.values())
    if isinstance(result, tuple | list):
        for part in result:
            yield from _flatten(part)
    else:
        yield result


def signature_of(target: Any) -> dict[str, inspect.Parameter]:
    """The parameters that a call takes; of a module those of its forward (Keras: call)."""
    if isinstance(target, nn.Module):
        called = (
            getattr(target, "call", None) if type(target).__module__.startswith("keras.") else None
        )
        target = called or target.forward
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # written in C, such as torch's own operator
        if target is nn.functional.scaled_dot_product_attention:

            def like(
                query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False
            ) -> None: ...

            return dict(inspect.signature(like).parameters)
        name = getattr(target, "__name__", target)
        raise Unable(
            f"{name} has no signature that can be read; wrap it in one of your own: lambda q, k,"
            " v: ..."
        ) from None
    found = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if not found:
        star = next((n for n, p in parameters.items() if p.kind == p.VAR_POSITIONAL), None)
        if star is None:
            raise Unable(
                f"{getattr(target, '__name__', target)} takes no arguments, so there is nothing to"
                " attend to"
            )
        return {star: parameters[star]}
    return found


def attribute(module: Any, names: tuple[str, ...]) -> int | None:
    """The first of these attributes that is a number, of the module or its config."""
    for holder in (module, getattr(module, "config", None), getattr(module, "args", None)):
        for name in names:
            if (
                isinstance(value := getattr(holder, name, None), int)
                and not isinstance(value, bool)
                and value > 0
            ):
                return value
    return None
