"""Modules of any make with their attention in our hands, for the length of a `with`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .foreign import Kind, held, kind_of
from .transformers import compute, having, observers

__all__ = ["attending"]


@contextmanager
def attending(modules: Iterable[nn.Module]) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """The modules with their attention in our hands, and afterwards as they were, torch's fused
    layers included.

    Those would pass the modules by, so they are off meanwhile. Gives what puts all back as it was
    for a while, except what somebody else has in hand too.
    """
    mine = list(modules)
    fast = torch.backends.mha.get_fastpath_enabled()
    fused = fast and not any(isinstance(module, nn.MultiheadAttention) for module in mine)

    def before() -> AbstractContextManager[None]:
        free = [module for module in mine if held[module] == 1]
        return _set(free, None, fast if len(free) == len(mine) else fused)

    with ExitStack() as stack:
        for module in mine:
            held[module] = held.get(module, 0) + 1
            stack.callback(_let_go, module)
        stack.enter_context(_set(mine, _attended, fused))
        yield before


@contextmanager
def _set(
    modules: list[nn.Module], forward: Callable[..., Any] | None, fast: bool
) -> Iterator[None]:
    """The modules with this forward (None: their class's own), and torch's fused layers on or off;
    put back at the end.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, enabled)
        for module in modules:
            stack.enter_context(
                having(module, forward=forward and functools.partial(forward, module))
            )
        torch.backends.mha.set_fastpath_enabled(fast)
        yield


def _let_go(module: nn.Module) -> None:
    held[module] -= 1


def _attended(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kind = kind_of(module)
    assert isinstance(kind, Kind)
    return kind.forward(
        module,
        functools.partial(type(module).forward, module),
        observers.get(module, compute),
        args,
        kwargs,
    )
