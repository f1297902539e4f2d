"""Finding out, by trying, how the thing under check is called and what its masks mean."""

from __future__ import annotations

import inspect
import itertools
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.names import NAMES
from .arguments import FULL, PADDED, MaskForm, forms
from .calling import INPUTS, TABLES, Subject, Unable, attribute, signature_of
from .projections import role_of_path
from .sharpen import sharpen_arrays, sharpened

METHODS = ("forward", "attend", "attention", "call", "compute")
LENGTHS = (5, 16, 4, 9, 49, 64)  # windows of pictures take only their own
# of inputs whose influence is looked for: no weight is then so small that it couldn't be seen
SMALL = 0.5


def find_subject(target: Any, given: Mapping[str, Any], heads: int | None) -> Subject:
    """The thing, ready to be called. `Unable` says in words what is missing."""
    name = getattr(target, "__name__", None) or type(target).__name__
    if inspect.isclass(target):
        raise Unable(
            f"{name} is a class: make one first, {name}({_needs(target)}), or from the command line"
            " say --args 'its arguments'"
        )
    module = target if isinstance(target, nn.Module) else None
    if module is not None:
        if type(target).__module__.startswith("keras."):
            target = module
        inner = [
            n
            for n, m in module.named_children()
            if re.search("attention|attn|mha", type(m).__name__, re.IGNORECASE)
        ]
        if len(inner) > 1 or isinstance(module, nn.RNNBase):
            raise Unable(
                f"{name} holds several attentions: check each by itself ({', '.join(inner)})"
                if inner
                else f"{name} isn't attention"
            )
        try:
            target = module = sharpened(module)
        except Exception as error:
            raise Unable(
                f"{name} can't be copied ({_short(error)}), and a check works on a copy"
            ) from error
    elif not callable(target):
        method = next((m for m in METHODS if callable(getattr(target, m, None))), None)
        if method is None:
            raise Unable(
                f"{name} can't be called, and has no method {', '.join(METHODS)}; give a module or"
                " a function"
            )
        target = getattr(sharpen_arrays(target), method)
    elif not inspect.isroutine(target) and hasattr(target, "__dict__"):
        target = sharpen_arrays(target)
    parameters = signature_of(target)
    unknown = [n for n in given if n not in parameters]
    if unknown and not _open(target):
        raise Unable(f"{name} takes no argument {unknown[0]!r}; it takes {', '.join(parameters)}")
    start = Subject(name, target, module, parameters, dict(given), heads=heads)
    first = next(iter(parameters))
    if start.roles.get(first) == "heads" and first == "h":
        start.parameters = {"x" if n == first else n: p for n, p in parameters.items()}
    tried: list[str] = []
    asked_for: list[int] = []  # sizes that errors speak of: a module of a fixed length says which
    fixed = (c for n in asked_for for c in _candidates(start, (n,)))
    for candidate in itertools.chain(_candidates(start), fixed):
        try:
            x = candidate.x(size=SMALL)
            out = candidate(x)
            if out.shape[:2] != x.shape[:2] or (out.shape[0], candidate.batch) != (
                candidate.batch,
                out.shape[0],
            ):
                raise Unable(f"it returned {list(out.shape)} for {list(x.shape)}")
        except Exception as error:
            what = f"{candidate.form} {candidate.layout} D={candidate.width}"
            tried.append(f"{what}: {_short(error)}")
            if module is not None and len(tried) < 4:
                asked_for += [
                    n
                    for n in map(int, re.findall(r"\d+", str(error)[:300]))
                    if 6 < n <= 1024 and n not in asked_for
                ]
            continue
        return _settled(candidate)
    asked = [
        n
        for n, p in parameters.items()
        if p.default is p.empty and n not in start.roles and n != first
    ]
    wish = (
        f"I don't know what {', '.join(asked)} should be: give {'them' if len(asked) > 1 else 'it'}"
        f" with arguments={{{asked[0]!r}: ...}}. "
        if asked
        else ""
    )
    raise Unable(
        f"{name}({', '.join(parameters)}) can't be called. {wish}Tried: "
        + "; ".join(dict.fromkeys(tried[:1] + tried[-1:]))
        + ". A function of your own that calls it with one "
        "argument x [B, L, D], or with q, k, v, can be checked too"
    )


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text[:160]}"


def _needs(target: Any) -> str:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return "..."
    return ", ".join(
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )


def _open(target: Any) -> bool:
    called = target.forward if isinstance(target, nn.Module) else target
    return any(p.kind == p.VAR_KEYWORD for p in inspect.signature(called).parameters.values())


def _candidates(start: Subject, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Subject]:
    """Ways to call it, the most plausible first."""
    module, has = start.module, set(start.roles.values())
    owner = module if module is not None else getattr(start.function, "__self__", start.function)
    heads = start.heads or attribute(owner, NAMES.num_heads)
    groups = attribute(owner, NAMES.num_kv_heads) or (2 if "kv_heads" in has else None)
    bare = (
        not (module is not None and any(True for _ in module.parameters()))
        and not any(" weight" in role for role in has)
        and "heads" not in has
        and not _arrays(owner)
    )
    widths = _widths(owner)
    if module is None and not _arrays(owner) and not heads:
        heads = 4
    required = [
        n
        for n, p in start.parameters.items()
        if p.default is p.empty and start.roles.get(n, "x") in INPUTS
    ]
    names = has & {"query", "key", "value"}
    triple = len(names) == 3 or (len(required) >= 3 and not has & set(INPUTS))
    if triple and len(names) < 3:  # a, b, c
        inner = dict(zip((n for n in start.parameters), ("query", "key", "value"), strict=False))
        start = replace(
            start,
            parameters={
                inner.get(n, n): p.replace(name=inner.get(n, n), kind=p.POSITIONAL_ONLY)
                for n, p in start.parameters.items()
            },
        )
    layouts = ["[B, L, D]", "[L, D]"]
    holders = (
        []
        if module is None
        else [module, *(module.children() if start.library is not None else ())]
    )
    if any(
        getattr(m, "batch_first", None) is False for m in holders
    ):  # of another's layers it's for its author to say
        layouts = ["[L, B, D]", "[L, D]"]
    if triple and bare:
        ways = [("heads", "[B, H, L, E]"), ("heads", "[B, L, E]"), ("heads", "[L, E]")]
    elif triple:
        ways = [("cross", layout) for layout in layouts] + [("heads", "[B, H, L, E]")]
    elif (
        "memory" in has
        and start.parameters[start.named("memory") or ""].default is inspect.Parameter.empty
    ):
        ways = [("memory", layout) for layout in layouts]
    elif "query" in names and "value" in names:
        ways = [("cross", layout) for layout in layouts]
    else:
        ways = [("self", layout) for layout in layouts]
    keys = _key_widths(module)
    numpy = (
        [True, False]
        if _uses_numpy(owner, start.function)
        else [False, True]
        if module is None
        else [False]
    )
    lengths = lengths if module is not None else lengths[:1]
    tables = TABLES if has & {"tables", "cos", "sin"} else TABLES[:1]
    blanks = (
        (None, "1")
        if any(
            r in ("mask", "padding") and start.parameters[n].default is inspect.Parameter.empty
            for n, r in start.roles.items()
        )
        else (None,)
    )
    fills = (True, False) if has & {"tables", "cos", "sin", "turns"} else (True,)
    for width in widths:
        for length in lengths:
            for form, layout in ways:
                single = form == "heads" and "H" not in layout
                for as_numpy in numpy:
                    for dtype in (torch.float64, torch.float32):
                        for table, filled, blank in (
                            (t, f, b) for t in tables for f in fills for b in blanks
                        ):
                            found = replace(
                                start,
                                form=form,
                                layout=layout,
                                numpy=as_numpy,
                                width=8 if single else width,
                                length=length,
                                table=table,
                                filled=filled,
                                blank=blank,
                                dtype=dtype,
                                key_widths=keys,
                                weights=_function_weights(has, width),
                            )
                            found.heads, found.groups = (1, 1) if single else (heads, groups)
                            yield _typed(found)


def _typed(subject: Subject) -> Subject:
    """The module in the subject's dtype; the same one serves all candidates."""
    if (
        subject.module is not None
        and next(
            (p for p in subject.module.parameters() if p.is_floating_point()),
            torch.zeros((), dtype=subject.dtype),
        ).dtype
        != subject.dtype
    ):
        subject.module.to(subject.dtype)
    return subject


def _function_weights(has: set[str], width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for role in sorted(has):
        if role.endswith((" weight", " bias")):
            shape = (
                (width, 3 * width if role.startswith("qkv") else width)
                if role.endswith("weight")
                else (width,)
            )
            found[role] = torch.empty(shape, dtype=torch.float64).normal_(generator=generator)
            found[role] *= 1.6 * width**-0.5 if role.endswith("weight") else 0.3
    return found


def _arrays(owner: Any) -> list[np.ndarray]:
    return [
        v
        for v in getattr(owner, "__dict__", {}).values()
        if isinstance(v, np.ndarray) and v.ndim >= 2
    ]


def _widths(owner: Any) -> list[int]:
    """The width of its vectors, as its attributes and its weights have it."""
    found: list[int] = []
    if isinstance(owner, nn.Module):
        found += [
            n for m in owner.modules() if isinstance(n := getattr(m, "in_features", None), int)
        ]
        found = sorted(set(found), key=lambda n: -found.count(n))  # the most frequent
        found += [
            n for p in owner.parameters() if p.ndim >= 2 for n in (p.shape[-1], *p.shape[:-1])
        ]
    found += [n for a in _arrays(owner) for n in a.shape]
    stated = attribute(owner, NAMES.embed_dim)
    return list(dict.fromkeys(([stated] if stated else []) + found))[:8] or [24]


def _key_widths(module: nn.Module | None) -> tuple[int | None, int | None]:
    """Widths of keys and values that a layer takes from elsewhere, where its projections say
    them.
    """
    if module is None:
        return None, None
    found = {
        who: m.in_features
        for n, m in module.named_modules()
        if isinstance(getattr(m, "in_features", None), int)
        and (who := role_of_path(n)) in ("k", "v", "kv")
    }
    k = getattr(module, "kdim", None) or found.get("k", found.get("kv"))
    return k, getattr(module, "vdim", None) or found.get("v", found.get("kv"))


def words_of(target: Any) -> set[str]:
    """Names that its code uses, its own methods and the functions of its file included: evidence,
    never proof.
    """
    found: set[str] = set()
    seen: set[int] = set()

    def walk(code: types.CodeType, names: Mapping[str, Any], owner: Any, depth: int) -> None:
        if id(code) in seen or depth > 4:
            return
        seen.add(id(code))
        found.update(code.co_names, code.co_varnames)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                walk(constant, names, owner, depth)
        for name in code.co_names:
            other = names.get(name) or getattr(type(owner), name, None)
            other = inspect.unwrap(other) if isinstance(other, types.FunctionType) else None
            if isinstance(other, types.FunctionType):
                walk(other.__code__, other.__globals__, owner, depth + 1)

    function = getattr(type(target), "forward", None) if isinstance(target, nn.Module) else target
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", target)
    function = (
        inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else function
    )
    if not isinstance(function, types.FunctionType):
        function = vars(type(target)).get("__call__")
    if isinstance(function, types.FunctionType):
        walk(function.__code__, function.__globals__, owner, 0)
    if isinstance(target, nn.Module):
        for name, m in target.named_modules():
            found |= {
                *name.split("."),
                type(m).__name__,
                *(k for k in vars(m) if not k.startswith("_")),
            }
            if m is not target and isinstance(
                f := inspect.unwrap(type(m).forward), types.FunctionType
            ):
                walk(f.__code__, f.__globals__, m, 2)
        found |= {
            n.rpartition(".")[2] for n, _ in [*target.named_parameters(), *target.named_buffers()]
        }
    return found


def mentions(target: Any, pattern: str) -> list[str]:
    """Names in its code that fit, those left out that are attributes or arguments switched off."""
    owners = list(target.modules()) if isinstance(target, nn.Module) else [target]

    def off(name: str) -> bool:
        values = [getattr(o, name) for o in owners if hasattr(o, name)]
        return bool(values) and all(v is None or v is False for v in values)

    return sorted(
        w for w in words_of(target) if re.search(pattern, w, re.IGNORECASE) and not off(w)
    )


def _uses_numpy(owner: Any, function: Any) -> bool:
    words = words_of(function)
    return bool(_arrays(owner)) or (
        bool(words & {"np", "numpy"}) and not words & {"torch", "F", "nn"}
    )


def influence(subject: Subject, length: int, **options: Any) -> Tensor:
    """[L, S]: what another token at j does to the output at i, beside the size of the output. NaN
    where the output is.

    Where a token seems to do nothing, also for inputs a tenth as large: scores without a scale give
        weights too small to be seen.
    """
    found = torch.zeros(length, length, dtype=torch.float64)
    for size in (SMALL, SMALL / 10):
        x = subject.x(1 if not options else None, length, size=size)
        base = subject(x, **options)
        for j in range(length):
            other = x.clone()
            other[:, j] = subject.x(x.shape[0], length, seed=100 + j, size=size)[:, j]
            found[:, j] = found[:, j].maximum(
                (subject(other, **options) - base).abs().amax((0, 2)) / _size(base)
            )
        if (found > 1e-5).all():
            break
    return found


def _size(t: Tensor) -> float:
    t = t[t.isfinite()]
    return max(t.abs().max().item(), 1e-30) if t.numel() else 1e-30


def _settled(subject: Subject) -> Subject:
    """What it can be asked beside its inputs: masks and what they mean, flags, the order of axes of
    split inputs.
    """
    if subject.layout == "[B, H, L, E]":
        subject = replace(subject, layout=_order(subject))
    own = influence(subject, subject.length)
    if (
        not ((own - torch.diag(own.diag())) > 1e-9).any()
        and not own.isnan().any()
        and not _reads_the_batch(subject)
    ):
        raise Unable(
            f"{subject.name} isn't attention as far as can be seen: called with {subject.layout},"
            " no output depends on another token. If it needs an argument to attend, give it with"
            " arguments={...}"
        )
    x, y, step = subject.x(size=SMALL), subject.x(seed=1, size=SMALL), subject.x(seed=2, size=SMALL)
    if torch.allclose(
        subject(x + step) - subject(x), subject(y + step) - subject(y), rtol=1e-5, atol=1e-9
    ):
        raise Unable(
            f"{subject.name} isn't attention: its output is linear in its input, so no weights"
            " depend on it"
        )
    for name, role in subject.roles.items():
        if role == "mask" and subject.mask is None:
            subject.mask = _mask(subject, name, FULL, own) or _mask(subject, name, PADDED, own)
            if subject.mask is not None and subject.mask.shape in PADDED:
                subject.padding, subject.mask = subject.mask, None
        elif role == "padding" and subject.padding is None:
            subject.padding = _mask(subject, name, (*PADDED, "[B, L, S]", "[B, 1, L, S]"), own)
        elif role == "causal" and subject.causal_flag is None:
            subject.causal_flag = name if _works_causal(subject, name) else None
        elif role == "weights":
            subject.weights_flag = name
    return subject


def _reads_the_batch(subject: Subject) -> bool:
    """Whether it attends along the batch, as a layer does that was meant to have the tokens
    first.
    """
    if subject.layout in ("[L, D]", "[L, E]"):
        return False
    x, other = subject.x(size=SMALL), subject.x(size=SMALL)
    other[-1] = subject.x(seed=9, size=SMALL)[-1]
    return bool((subject(other) - subject(x))[0].abs().max() > 1e-9)


def _order(subject: Subject) -> str:
    """Whether split inputs are [B, H, L, E] or [B, L, H, E]: heads don't read each other."""

    def mixes(layout: str) -> float:
        tried = replace(subject, layout=layout)
        x = tried.x(size=SMALL)
        other = x.clone()
        width = tried.width // (tried.heads or 1)
        other[..., :width] = tried.x(seed=7, size=SMALL)[..., :width]
        try:
            changed = (
                (tried(other) - tried(x))
                .abs()
                .unflatten(-1, (tried.heads or 1, -1))
                .amax((0, 1, 3))
            )
        except Exception:
            return torch.inf
        return float(changed[1:].max())

    return (
        "[B, L, H, E]" if mixes("[B, H, L, E]") > 1e-9 > mixes("[B, L, H, E]") else "[B, H, L, E]"
    )


def _mask(subject: Subject, name: str, shapes: tuple[str, ...], own: Tensor) -> MaskForm | None:
    """What the mask argument wants: that under which hidden keys do nothing; else the least, with
    what they still do.
    """
    length = subject.length
    at = torch.arange(length)
    columns: tuple[int, ...]
    if shapes is FULL:
        may = (
            at[:, None] + at
        ) % 3 != 1  # every row reads some keys and not others, and so it does inverted
        columns = (0, 1, length - 2)
    else:
        may = torch.ones(length, length, dtype=torch.bool)
        may[:, length - 2 :] = False  # at the end, where lengths can say it too
        columns = (0, 1, length - 2, length - 1)
    best: MaskForm | None = None
    x = subject.x(size=SMALL)
    others = []
    for j in columns:
        other = x.clone()
        other[:, j] = subject.x(seed=100 + j, size=SMALL)[:, j]
        others.append((j, other))
    for form in forms(name, shapes):
        tried = replace(subject, mask=form) if shapes is FULL else replace(subject, padding=form)
        valid = (
            None
            if shapes is FULL
            else (
                may.expand(subject.batch, -1, -1)
                if form.shape in FULL
                else may[0].expand(subject.batch, -1)
            )
        )
        hidden: list[float] = []
        read: list[float] = []
        try:
            base = tried(x, may=may if shapes is FULL else None, valid=valid)
            for j, other in others:
                change = (
                    tried(other, may=may if shapes is FULL else None, valid=valid) - base
                ).abs().amax((0, 2)) / _size(base)
                for i in range(length):
                    if i != j and not own[i, j] < 1e-9:
                        (read if may[i, j] else hidden).append(change[i].item())
        except Exception:
            continue
        if not hidden or not read or not np.isfinite(hidden + read).all():
            continue
        leak = max(hidden) / max(max(read), 1e-30)
        if leak < 1e-5 and min(read) > 1e-9:
            return form
        if leak < 0.9 and (best is None or leak < best.leak):
            best = replace(form, leak=leak)
    return best


def _works_causal(subject: Subject, name: str) -> bool:
    try:
        found = influence(subject, subject.length, more={name: True})
    except Exception:
        return False
    return bool(found.triu(1).max() < 0.9 * found.tril(-1).max()) or bool(found.isnan().any())
