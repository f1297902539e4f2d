"""See what modules return between projections and weights, and change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .factors import CannotRead


@contextmanager
def watch_points(
    module: nn.Module | None,
    at: tuple[str | None, str | None],
    lengths: tuple[int, int],
    points: dict[str, Tensor],
    change: Tensor | None,
) -> Iterator[None]:
    """Note in `points` the values `[S, W]` that one module returns, and the heads' outputs `[L, W]`
    that another takes; add `change` to the values. `lengths` are S and L.
    """
    values_at, heads_at = at
    handles: list[RemovableHandle] = []

    def returned(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        axes = find_rows(out, lengths[0])
        points["v"] = out.detach().double().permute(axes).flatten(0, 1).flatten(1)
        if change is None:
            return out
        inverse = [axes.index(a) for a in range(len(axes))]
        return out + change.reshape([out.shape[a] for a in axes]).permute(inverse).to(out)

    def taken(_: nn.Module, args: Any) -> None:
        axes = find_rows(args[0], lengths[1])
        points["z"] = args[0].detach().double().permute(axes).flatten(0, 1).flatten(1)

    if module is not None and values_at is not None:
        handles.append(module.get_submodule(values_at).register_forward_hook(returned))
    if module is not None and heads_at is not None:
        handles.append(module.get_submodule(heads_at).register_forward_pre_hook(taken))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def outputs_of_modules(module: nn.Module) -> tuple[dict[str, Tensor], list[RemovableHandle]]:
    """A dict that gets what each module returns for one sequence, `[L, n]`, and the handles of the
    hooks; parameters are in it from the start.
    """
    seen = {
        name: p.detach().double().reshape(1, -1)
        for name, p in module.named_parameters()
        if p.ndim < 2 or p.numel() in p.shape
    }

    def catch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, out: object) -> None:
            if isinstance(out, Tensor) and out.ndim >= 2 and out.is_floating_point():
                seen[name] = out.detach().double().reshape(-1, out.shape[-1])

        return hook

    return seen, [m.register_forward_hook(catch(n)) for n, m in module.named_modules() if n]


def find_rows(t: Tensor, length: int) -> list[int]:
    """The order of the axes of values or heads' outputs `[1, ...]`, batch and tokens first, then
    heads, then their features.

    Raises:
        CannotRead: they aren't those of one sequence of this length.
    """
    shape = list(t.shape)
    if not shape or shape[0] != 1 or length not in shape[1:] or len(shape) not in (3, 4):
        raise CannotRead(f"{shape} isn't what one sequence of {length} tokens has")
    if len(shape) == 4:  # [1, H, L, E] or [1, L, H, E]
        return [0, 2, 1, 3] if shape[2] == length else [0, 1, 2, 3]
    return [0, 1, 2] if shape[1] == length else [0, 2, 1]
