"""Modules of any make with their attention in our hands, for the length of a `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

from .foreign import PatchedForward
from .transformers import having

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
        free = [module for module in mine if "_multihead_frames" not in vars(module)]
        return _set(free, None, fast if len(free) == len(mine) else fused)

    with ExitStack() as stack:
        stack.enter_context(_set(mine, True, fused))
        yield before


@contextmanager
def _set(modules: list[nn.Module], patched: bool | None, fast: bool) -> Iterator[None]:
    """The modules with this forward (None: their class's own), and torch's fused layers on or off;
    put back at the end.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, enabled)
        for module in modules:
            stack.enter_context(having(module, forward=PatchedForward(module) if patched else None))
        torch.backends.mha.set_fastpath_enabled(fast)
        yield
