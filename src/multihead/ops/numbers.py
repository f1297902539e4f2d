"""Numbers that may be tensors: `scale`, `softcap` and `dropout` of an attention call.

A number becomes a Python float, whatever holds it. What would need a gradient either gets one (a
learned scale multiplies the queries) or is refused: it is never detached.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from ..errors import MultiheadError
from .modes import hidden, transformed
from .tensors import require_tensor


def to_float(name: str, value: Any) -> float:
    """The number as a float: an int, float, NumPy number or tensor of one element.

    Raises:
        TypeError: what isn't a number, and a tensor that requires a gradient or whose value can't
            be read (under torch.compile and transforms of torch.func).
        MultiheadError: a tensor of several elements.

    >>> to_float("softcap", 30), to_float("softcap", torch.tensor(30.0))
    (30.0, 30.0)
    """
    if isinstance(value, float | torch.SymFloat):
        return float(value) if isinstance(value, float) else value  # type: ignore[return-value]
    if isinstance(value, Tensor):
        _require_real(name, value)
        if value.numel() != 1:
            raise MultiheadError(f"{name}{list(value.shape)}: expected one number; pass a float")
        if value.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{name} is a tensor that requires a gradient, which {name} doesn't get: pass"
                f" {name}.item(), or {name}.detach()"
            )
        if _is_traced(value) or value.is_meta or isinstance(value, FakeTensor):
            raise TypeError(
                f"{name} is a tensor whose value can't be read here (torch.compile, a transform of"
                f" torch.func, or a tensor without values): pass a Python number, {name}.item()"
            )
        return float(value.item())
    if isinstance(value, bool | str | bytes) or getattr(value, "ndim", 0) != 0:
        found = None
    else:
        try:
            found = float(value)
        except (TypeError, ValueError, OverflowError):
            found = None
    if found is None or getattr(getattr(value, "dtype", None), "kind", "f") not in "fiu":
        raise TypeError(f"{name}={value!r}: expected a number; pass a float")
    return found


def default_scale(width: int) -> float:
    """1 / sqrt(E). torch.jit.trace gives sizes as tensors of integers, whose roots would be rounded
    to float32.

    >>> default_scale(64)
    0.125
    """
    return max(int(width) if isinstance(width, Tensor) else width, 1) ** -0.5


def to_softcap(softcap: Any) -> float | None:
    """A soft cap that float32 holds, as its inverse does: of scores a smaller one leaves nothing,
    and a larger one, None here, leaves everything.

    >>> to_softcap(50), to_softcap(1e300)
    (50.0, None)
    """
    number = to_float("softcap", softcap)
    if isinstance(number, float) and not 0 < number < math.inf:
        raise MultiheadError(f"softcap={number}: expected a finite number above 0, or None")
    return None if number > 1e30 else max(number, 1e-30)


def to_dropout(dropout: Any, name: str = "dropout") -> float:
    """A probability with which weights are dropped.

    >>> to_dropout(0)
    0.0
    """
    number = to_float(name, dropout)
    if not 0 <= number < 1:
        raise MultiheadError(
            f"{name}={number}: expected the share of the weights to drop, at least 0 and below 1"
        )
    return number


def add_biases(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two biases. Only -inf forbids a key: a finite sum below what the dtype holds
    becomes the lowest number that it holds.

    >>> low = torch.tensor([torch.finfo(torch.float32).min, -torch.inf])
    >>> add_biases(low, low) > -torch.inf
    tensor([ True, False])
    """
    total = a + b
    forbidden = (a == -torch.inf) | (b == -torch.inf)
    return torch.where(forbidden, total, total.clamp(min=torch.finfo(total.dtype).min))


def fold_scale(q: Tensor, scale: Any) -> tuple[Tensor, float]:
    """Queries `[B, H, L, E]` and a number that together scale as `scale` does: a number, or a
    tensor that broadcasts to `[B, H, L, 1]`, of which the queries get what isn't one number, and
    what gets a gradient.

    Raises:
        TypeError: what is neither a number nor a tensor of them.
        MultiheadError: a tensor of another shape, or numbers that aren't finite in the dtype of
            the scores.

    >>> q, scale = fold_scale(torch.ones(1, 2, 3, 4), torch.tensor([2.0, 3.0]).view(2, 1, 1))
    >>> q[0, :, 0, 0], scale
    (tensor([2., 3.]), 1.0)
    """
    if not isinstance(scale, Tensor):
        number = to_float("scale", scale)
        _require_finite(q, scale, number)
        return q, number
    _require_real("scale", scale)
    full = (*q.shape[:3], 1)
    if scale.ndim > 4 or any(
        have not in (1, want) for have, want in zip(scale.shape[::-1], full[::-1], strict=False)
    ):
        raise MultiheadError(
            f"scale{list(scale.shape)} doesn't broadcast to [B, H, L, 1] = {list(full)}: expected"
            " one number, or one for each head, scale.view(H, 1, 1)"
        )
    if hidden(scale) or hidden(q):
        return q * scale.to(q.dtype), 1.0
    if scale.numel() != 1:
        if not bool(scale.isfinite().all()):
            raise MultiheadError(f"scale{list(scale.shape)}: expected finite numbers")
        return q * scale.to(q.dtype), 1.0
    number = float(scale.detach().item())
    _require_finite(q, number, number)
    if not (scale.requires_grad and torch.is_grad_enabled()):
        return q, number
    if number == 0:
        return q * scale.to(q.dtype), 1.0
    # times one, so that no query is rounded, and with the gradient of the scale
    return q * (scale / number).to(q.dtype), number


def _is_traced(x: Tensor) -> bool:
    """Whether x is being differentiated forward, mapped by vmap or compiled."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return transformed() and forward_ad.unpack_dual(x).tangent is not None


def _require_finite(q: Tensor, scale: Any, number: float) -> None:
    if isinstance(number, torch.SymFloat):
        return
    largest = torch.finfo(torch.float64 if q.dtype == torch.float64 else torch.float32).max
    if not -largest <= number <= largest:  # also of NaN; torch.compile knows no math.isfinite
        raise MultiheadError(
            f"scale={scale}: expected a finite number, of at most {largest:.3g} for q of {q.dtype},"
            " or None"
        )


def _require_real(name: str, x: Tensor) -> None:
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} is {x.dtype}: expected real numbers; pass a float")


def dequantize(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 x `[B, G, S, E]` times scales `[B, G, S]`, in `dtype`; the products are those of float32
    or better, rounded once.

    >>> import torch
    >>> dequantize(torch.tensor([[[[-127, 64]]]]).char(), torch.tensor([[[0.5]]]), torch.float32)
    tensor([[[[-63.5000,  32.0000]]]])
    """
    wide = torch.promote_types(dtype, torch.float32)
    return (x.to(wide) * scales.to(wide).unsqueeze(-1)).to(dtype)


def check_scales(name: str, x: Tensor, scales: Tensor | None) -> None:
    """Raise unless int8 keys or values come with scales, and others without."""
    argument = f"{name}_scale"
    if scales is None:
        if x.dtype == torch.int8:
            raise MultiheadError(
                f"{name} is int8, but {argument} is None: expected floating numbers"
                f" {list(x.shape[:3])} that it is multiplied with; give both k_scale= and v_scale="
            )
        return
    require_tensor(argument, scales, "a tensor of floating numbers [B, G, S]")
    if x.dtype != torch.int8:
        advice = f"leave {argument}= out"
        if not x.is_floating_point():
            advice = "store numbers from -127 to 127, whose zero is 0"
        raise TypeError(f"{argument} was given, but {name} is {x.dtype}: expected int8; {advice}")
    if not scales.is_floating_point():
        raise TypeError(f"{argument} is {scales.dtype}: expected floating numbers, as float32")
    if scales.shape != x.shape[:3]:
        raise MultiheadError(
            f"{argument}{list(scales.shape)}: expected [B, G, S] = {list(x.shape[:3])}, one number"
            f" for each head and token of {name}{list(x.shape)}"
        )
    if scales.requires_grad:
        raise MultiheadError(
            f"{argument} requires a gradient, which int8 {name} hasn't; detach it, or multiply"
            f" first: {name} = {name}.float() * {argument}[..., None]"
        )
