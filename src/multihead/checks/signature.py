"""Signatures and attributes of the callable: parameters, and numbers under known names."""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch import nn

from ..errors import MultiheadError
from ..models.names import find_number

LIBRARIES = ("torch", "transformers", "timm", "keras", "multihead")


class CannotCall(MultiheadError):
    """The callable can't be called, or not in this way; the message names what is missing."""


class NotAttention(CannotCall):
    """It can be called, and no weights depend on its input."""


def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a call; of a module those of its forward (Keras: call).

    >>> list(parameters_of(lambda q, k, v: q))
    ['q', 'k', 'v']
    """
    if isinstance(target, nn.Module):
        is_keras = type(target).__module__.startswith("keras.")
        target = (getattr(target, "call", None) if is_keras else None) or target.forward
    name = getattr(target, "__name__", target)
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # written in C
        if target is nn.functional.scaled_dot_product_attention:
            return dict(inspect.signature(_scaled_dot_product_attention).parameters)
        raise CannotCall(
            f"{name} has no signature that can be read; wrap it in a function: lambda q, k, v: ..."
        ) from None
    kept = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if kept:
        return kept
    star = {n: p for n, p in parameters.items() if p.kind == p.VAR_POSITIONAL}
    if not star:
        raise CannotCall(f"{name} takes no arguments, so there is nothing to attend to")
    return star


def _scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False
) -> None: ...


def takes_any_keyword(target: Any) -> bool:
    """Whether it has **kwargs."""
    called = target.forward if isinstance(target, nn.Module) else target
    return any(p.kind == p.VAR_KEYWORD for p in inspect.signature(called).parameters.values())


def required_names(target: Any) -> str:
    """Names of the parameters without a default, for a message; "..." without a signature."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return "..."
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return ", ".join(p.name for p in named if p.default is p.empty)


def library_of(target: Any) -> str | None:
    """The known library that a module or function comes from."""
    owner = target if isinstance(target, types.FunctionType) else type(target)
    top = (getattr(owner, "__module__", None) or "").partition(".")[0]
    return top if top in LIBRARIES else None


def read_number(module: Any, names: tuple[str, ...]) -> int | None:
    """The first of these attributes that is an int above 0, on the module, its config or args."""
    holders = (module, getattr(module, "config", None), getattr(module, "args", None))
    return next((n for holder in holders if (n := find_number(holder, names))), None)
