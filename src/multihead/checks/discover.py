"""Find out, by trying, how a module, function or object is called: `find_callee`."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.names import NAMES
from .arguments import INPUTS, TABLES
from .callee import START_SHAPES, TABLE_SHAPES, Callee
from .code_names import names_in_code
from .probing import SMALL, complete
from .projections import projection_of_path
from .random_weights import with_large_random_arrays, with_large_random_weights
from .signature import CannotCall, parameters_of, read_number, required_names, takes_any_keyword

METHODS = ("forward", "attend", "attention", "call", "compute")
LENGTHS = (5, 16, 4, 9, 49, 64)  # image windows take only theirs
# Masks that may hide nothing, where one has to be given: either meaning of True, or added.
BLANKS = tuple(
    (fill, shape)
    for shape in ("[L, S]", "[B, S]", "[B, 1, L, S]", "[B, L, S]", "[B, 1, 1, S]", "[B]")
    for fill in ((True, False, 1.0, 0.0) if shape != "[B]" else (1.0,))
)
DEFAULT_HEADS, DEFAULT_KV_HEADS, DEFAULT_DIM, SINGLE_HEAD_DIM = 4, 2, 24, 8


def find_callee(target: Any, arguments: Mapping[str, Any], num_heads: int | None) -> Callee:
    """The callable, ready to be called.

    Raises:
        CannotCall: nothing that was tried works; the message names what is missing.
    """
    name = getattr(target, "__name__", None) or type(target).__name__
    target = _prepare_copy(target, name)
    module = target if isinstance(target, nn.Module) else None
    parameters = parameters_of(target)
    unknown = [n for n in arguments if n not in parameters]
    if unknown and not takes_any_keyword(target):
        raise CannotCall(
            f"{name} takes no argument {unknown[0]!r}; it takes {', '.join(parameters)}"
        )
    start = Callee(name, target, module, parameters, dict(arguments), num_heads=num_heads)
    first = next(iter(parameters))
    if first == "h" and start.roles.get(first) == "num_heads":  # here h means hidden states
        renamed = parameters[first].replace(name="x", kind=inspect.Parameter.POSITIONAL_ONLY)
        rest = {n: p for n, p in parameters.items() if n != first}
        start = replace(start, parameters={"x": renamed, **rest})
    failures: list[str] = []
    rejected: CannotCall | None = None
    # Sizes that errors mention: a module of one fixed length states it.
    lengths: list[int] = []
    fixed = (c for length in lengths for c in _candidates(start, (length,)))
    for candidate in itertools.chain(_candidates(start), fixed):
        try:
            x = candidate.x(size=SMALL)
            out = candidate(x)
            if out.shape[:2] != x.shape[:2]:
                raise CannotCall(f"it returned {list(out.shape)} for {list(x.shape)}")
            if candidate.blank is not None and not out.isfinite().all():
                raise CannotCall("its output isn't finite")
            for batch in (1, 2):
                candidate(candidate.x(batch, size=SMALL))
        except Exception as error:
            tried = f"{candidate.form} {candidate.layout} D={candidate.embed_dim}"
            failures.append(f"{tried}: {_summarize(error)}")
            if module is not None and len(failures) < 4:
                sizes = map(int, re.findall(r"\d+", str(error)[:300]))
                lengths += [n for n in sizes if 6 < n <= 1024 and n not in lengths]
            continue
        try:
            return complete(candidate)
        except CannotCall as error:  # also what a mask gives that hides everything
            if candidate.blank is None:
                raise
            rejected = rejected or error
    if rejected is not None:
        raise rejected
    unnamed = [n for n in start.unknown if n != first]
    wish = ""
    if unnamed:
        pronoun = "them" if len(unnamed) > 1 else "it"
        wish = (
            f"The role of {', '.join(unnamed)} is unknown: pass {pronoun} with"
            f" arguments={{{unnamed[0]!r}: ...}}. "
        )
    raise CannotCall(
        f"{name}({', '.join(parameters)}) can't be called. {wish}Tried:"
        f" {'; '.join(dict.fromkeys(failures[:1] + failures[-1:]))}. You can also check a function"
        " that calls it with one argument x [B, L, D], or with q, k, v"
    )


def _prepare_copy(target: Any, name: str) -> Any:
    """A copy of the module, function or method, with large random weights.

    Raises:
        CannotCall: a class, what can't be called or copied, or several attentions in one.
    """
    if inspect.isclass(target):
        raise CannotCall(
            f"{name} is a class: create an instance first, {name}({required_names(target)}), or on"
            " the command line pass --args 'its arguments'"
        )
    if isinstance(target, nn.Module):
        inner = [
            n
            for n, m in target.named_children()
            if re.search("attention|attn|mha", type(m).__name__, re.IGNORECASE)
        ]
        if len(inner) > 1:
            raise CannotCall(
                f"{name} holds several attentions: check each separately ({', '.join(inner)})"
            )
        if isinstance(target, nn.RNNBase):
            raise CannotCall(f"{name} isn't attention")
        try:
            return with_large_random_weights(target)
        except Exception as error:
            raise CannotCall(
                f"{name} can't be copied ({_summarize(error)}), and check works on a copy"
            ) from error
    if not callable(target):
        method = next((m for m in METHODS if callable(getattr(target, m, None))), None)
        if method is None:
            raise CannotCall(
                f"{name} can't be called and has no method {', '.join(METHODS)}; pass a module or a"
                " function"
            )
        return getattr(with_large_random_arrays(target), method)
    if not inspect.isroutine(target) and hasattr(target, "__dict__"):
        return with_large_random_arrays(target)
    return target


def _summarize(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text[:160]}"


@dataclass
class _Options:
    """Options that the candidates vary, the most plausible first."""

    start: Callee
    roles: set[str]
    embed_dims: list[int]
    ways: list[tuple[str, str]]  # form and layout
    numpy: list[bool]
    table_shapes: tuple[str, ...]
    passes_tables: tuple[bool, ...]
    starts: tuple[str, ...]
    blanks: tuple[tuple[float | bool, str] | None, ...]


def _candidates(start: Callee, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Callee]:
    """Ways to call it, the most plausible first."""
    options = _options(start)
    start = options.start
    lengths = lengths if start.module is not None else lengths[:1]
    for embed_dim, length, (
        form,
        layout,
    ), numpy, dtype, shape, tables, first, blank in itertools.product(
        options.embed_dims,
        lengths,
        options.ways,
        options.numpy,
        (torch.float64, torch.float32),
        options.table_shapes,
        options.passes_tables,
        options.starts,
        options.blanks,
    ):
        candidate = replace(
            start,
            form=form,
            layout=layout,
            numpy=numpy,
            embed_dim=embed_dim,
            length=length,
            table_shape=shape,
            passes_tables=tables,
            start_shape=first,
            blank=blank,
            dtype=dtype,
            weights=_function_weights(options.roles, embed_dim),
        )
        if form == "heads" and "H" not in layout:  # one head
            candidate.embed_dim, candidate.num_heads, candidate.num_kv_heads = SINGLE_HEAD_DIM, 1, 1
        _convert_module(candidate)
        yield candidate


def _options(start: Callee) -> _Options:
    roles, module = set(start.roles.values()), start.module
    owner = module if module is not None else getattr(start.function, "__self__", start.function)
    num_heads = start.num_heads or read_number(owner, NAMES.num_heads)
    has_weights = module is not None and any(True for _ in module.parameters())
    has_weights = has_weights or any(" weight" in role for role in roles) or bool(_arrays(owner))
    is_bare = not has_weights and "num_heads" not in roles
    if module is None and not _arrays(owner) and not num_heads:
        num_heads = DEFAULT_HEADS
    named = roles & {"query", "key", "value"}
    required = [
        n for n in start.parameters if start.is_required(n) and start.roles.get(n, "x") in INPUTS
    ]
    is_triple = len(named) == 3 or (len(required) >= 3 and not roles & set(INPUTS))
    first, second = (*start.parameters, "", "")[:2]
    if is_triple and len(named) < 3:  # f(a, b, c)
        start = replace(start, parameters=_name_inputs(start.parameters, "query", "key", "value"))
    elif (
        module is not None
        and not is_triple
        and second
        and {first, second} & set(start.unknown)
        and all(start.is_required(n) and start.roles.get(n, "x") == "x" for n in (first, second))
        and not roles & {"key", "value", "memory"}
    ):
        # f(latents, media): what else it takes, it may attend to
        names = ("memory", "x") if second == "latents" else ("x", "memory")
        start = replace(start, parameters=_name_inputs(start.parameters, *names))
    start = replace(
        start,
        num_heads=num_heads,
        num_kv_heads=read_number(owner, NAMES.num_kv_heads)
        or (DEFAULT_KV_HEADS if "num_kv_heads" in roles else None),
        kv_dims=_find_kv_dims(module),
    )
    memory = start.find_argument("memory")
    if is_triple and is_bare:
        ways = [("heads", layout) for layout in ("[B, H, L, E]", "[B, L, E]", "[L, E]")]
    elif is_triple:
        ways = [("cross", x) for x in _layouts(start)] + [("heads", "[B, H, L, E]")]
    elif memory is not None and start.is_required(memory):
        ways = [("memory", layout) for layout in _layouts(start)]
    else:
        form = "cross" if {"query", "value"} <= named else "self"
        ways = [(form, layout) for layout in _layouts(start)]
        if memory is not None and form == "self":  # its width may be another than that of x
            ways += [("memory", layout) for layout in _layouts(start)]
    uses_numpy = bool(_arrays(owner)) or _names_only_numpy(start.function)
    requires_mask = any(
        role in ("mask", "padding") and start.is_required(name)
        for name, role in start.roles.items()
    )
    requires_start = any(start.is_required(n) for n, r in start.roles.items() if r == "start")
    has_tables = bool(roles & set(TABLES))
    return _Options(
        start,
        roles,
        _find_embed_dims(owner),
        ways,
        [True, False] if uses_numpy else [False, True] if module is None else [False],
        TABLE_SHAPES if roles & set(TABLES[:3]) else TABLE_SHAPES[:1],
        (True, False) if has_tables else (True,),
        START_SHAPES if requires_start else START_SHAPES[:1],
        (None, *BLANKS) if requires_mask else (None,),
    )


def _name_inputs(
    parameters: Mapping[str, inspect.Parameter], *roles: str
) -> dict[str, inspect.Parameter]:
    """The parameters, the first of them named as these roles and passed by position."""
    names = dict(zip(parameters, roles, strict=False))
    return {
        names.get(n, n): p.replace(name=names.get(n, n), kind=p.POSITIONAL_ONLY)
        for n, p in parameters.items()
    }


def _layouts(start: Callee) -> list[str]:
    # The children of a user's module may be sequence first while the module isn't; of a library's
    # module they tell.
    modules = [] if start.module is None else [start.module]
    if start.module is not None and start.library is not None:
        modules += start.module.children()
    is_sequence_first = any(getattr(m, "batch_first", None) is False for m in modules)
    return ["[L, B, D]" if is_sequence_first else "[B, L, D]", "[L, D]"]


def _convert_module(callee: Callee) -> None:
    """Convert the module, which all candidates share, to the callee's dtype."""
    if callee.module is None:
        return
    floating = (p for p in callee.module.parameters() if p.is_floating_point())
    if any(p.dtype != callee.dtype for p in itertools.islice(floating, 1)):
        callee.module.to(callee.dtype)


def _function_weights(roles: set[str], embed_dim: int) -> dict[str, Tensor]:
    """Matrices and biases for a function that takes its projections as arguments."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for role in sorted(roles):
        if not role.endswith((" weight", " bias")):
            continue
        is_matrix = role.endswith("weight")
        columns = 3 * embed_dim if role.startswith("qkv") else embed_dim
        shape = (embed_dim, columns) if is_matrix else (embed_dim,)
        noise = torch.empty(shape, dtype=torch.float64).normal_(generator=generator)
        weights[role] = noise * (1.6 * embed_dim**-0.5 if is_matrix else 0.3)
    return weights


def _arrays(owner: Any) -> list[np.ndarray]:
    values = getattr(owner, "__dict__", {}).values()
    return [v for v in values if isinstance(v, np.ndarray) and v.ndim >= 2]


def _names_only_numpy(function: Any) -> bool:
    names = names_in_code(function)
    return bool(names & {"np", "numpy"}) and not names & {"torch", "F", "nn"}


def _find_embed_dims(owner: Any) -> list[int]:
    """Widths D that attributes and weights suggest, the stated one first."""
    sizes: list[int] = []
    if isinstance(owner, nn.Module):
        inputs = [getattr(m, "in_features", None) for m in owner.modules()]
        counted = [n for n in inputs if isinstance(n, int)]
        sizes += sorted(set(counted), key=lambda n: -counted.count(n))
        for parameter in owner.parameters():
            if parameter.ndim >= 2:
                sizes += [parameter.shape[-1], *parameter.shape[:-1]]
    sizes += [n for array in _arrays(owner) for n in array.shape]
    stated = read_number(owner, NAMES.embed_dim)
    return list(dict.fromkeys(([stated] if stated else []) + sizes))[:8] or [DEFAULT_DIM]


def _find_kv_dims(module: nn.Module | None) -> tuple[int | None, int | None]:
    """Widths of keys and values where the module or its projections state them."""
    if module is None:
        return None, None
    widths = {
        projection: m.in_features
        for path, m in module.named_modules()
        if isinstance(getattr(m, "in_features", None), int)
        and (projection := projection_of_path(path)) in ("q", "k", "v", "kv")
    }
    k, v = (widths.get(who, widths.get("kv")) for who in "kv")
    if k == v == widths.get("q"):  # as queries, be it all features of a token or those of a head
        k = v = None
    return getattr(module, "kdim", None) or k, getattr(module, "vdim", None) or v
