"""`Facts`: properties of the callable under check, measured once; and helpers of the properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import TABLES
from .callee import Callee, CallSpec
from .code_names import find_names
from .probing import measure_influence

WINDOWS = r"window|local|sliding|band|spars|chunk|block|neigh|stride|dilat"
# Steps by which tokens reach their neighbours outside the weights: convolutions, pooling, shifts.
MIXERS = (
    r"^(depthwise_|dw_|short_)?conv_?[123]d|(avg|max)_?pool|^pool(ing)?(_|$)|(token|time)_?shift|"
    r"^shift(ed)?(_|$)|time_?mix|lepe|^(pad|unfold|cumsum|roll|cummax|cumprod|ema)$|^(GRU|LSTM|RNN)"
)
POSITIONS = (
    r"rot(ary|ate)|rope|alibi|(^|_)pos(_|$|ition)|slopes?($|_)|distances?($|_)|inv_freq|freqs|relative|^cos$|^sin$|"
    r"cos_sin|rel_"
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Facts:
    """Measurements of a callable, shared by the properties.

    Attributes:
        callee: the callable.
        declared_causal: what the user states; None to find out.
        target: the object whose code is searched for names.

    >>> from multihead.checks.discover import find_callee
    >>> facts = Facts(find_callee(torch.nn.MultiheadAttention(8, 2), {}, None))
    >>> facts.length, facts.is_causal, facts.causal_by
    (5, False, 'mask')
    """

    callee: Callee
    declared_causal: bool | None = None
    target: Any = None

    @property
    def length(self) -> int:
        return self.callee.length

    @property
    def threshold(self) -> float:
        """Influence and relative differences up to this count as none."""
        return 1e-7 if self.callee.dtype == torch.float64 else 1e-5

    @cached_property
    def influence(self) -> Tensor:
        """`measure_influence`, `[L, S]`, called with the inputs alone."""
        return measure_influence(self.callee, self.length)

    @cached_property
    def is_causal(self) -> bool:
        """Whether, called with its inputs alone, it hides later tokens."""
        influence = self.influence.nan_to_num(0.0)
        later = torch.ones_like(influence).triu(1).bool()
        past, future = influence[later.T], influence[later]
        if not past.gt(self.threshold).any():
            return False
        hidden, missing = (x.le(self.threshold).double().mean() for x in (future, past))
        # An off-by-one still hides most of the future; a mask after the softmax lets a little of it
        # through.
        return bool(hidden >= 0.5 and hidden > missing) or bool(future.mean() < 0.1 * past.mean())

    @cached_property
    def window(self) -> Tensor | None:
        """bool `[L, S]`, the keys that queries read, if the code mentions a window and some earlier
        tokens have no influence.
        """
        reads = self.influence.nan_to_num(0.0) > self.threshold
        reads |= torch.eye(len(reads), dtype=torch.bool)
        has_all_past = reads.tril().equal(torch.ones_like(reads).tril())
        return None if has_all_past or not self.find_names(WINDOWS) else reads

    @cached_property
    def causal_by(self) -> str | None:
        """The way to hide later tokens: "itself", a "flag", a "mask", or None."""
        callee = self.callee
        if self.is_causal or (self.declared_causal and not callee.causal_flag and not callee.mask):
            return "itself"
        if callee.causal_flag is not None:
            return "flag"
        return None if callee.mask is None else "mask"

    def causal_spec(self, length: int, num_keys: int | None = None) -> CallSpec:
        """A causal call, if there is a way, of the last `length` of `num_keys` tokens."""
        if self.causal_by == "flag":
            return CallSpec(arguments={str(self.callee.causal_flag): True})
        if self.causal_by == "mask":
            num_keys = num_keys or length
            allowed = torch.ones(length, num_keys, dtype=torch.bool)
            return CallSpec(allowed=allowed.tril(num_keys - length))
        return CallSpec()

    def describe(self, spec: CallSpec) -> str:
        """The options of a causal call, as a part of a sentence."""
        if spec.arguments:
            return " with " + ", ".join(f"{k}={v}" for k, v in spec.arguments.items())
        if spec.allowed is not None and self.callee.mask is not None:
            return f" with a causal mask as {self.callee.mask.description}"
        return ""

    def find_names(self, pattern: str) -> list[str]:
        return find_names(self.target, pattern)

    @cached_property
    def token_mixers(self) -> list[str]:
        """Names of steps by which tokens reach their neighbours outside the weights."""
        if self.callee.library is not None:
            return []
        module = self.callee.module
        wide = [
            name
            for name, child in (module.named_modules() if module is not None else ())
            if torch.Size(getattr(child, "kernel_size", ()) or ()).numel() > 1
        ]
        if wide:
            return wide
        names = self.find_names(MIXERS)
        # A convolution of single tokens is a Linear; torch's pads in its code.
        is_linear = any(isinstance(m, _CONVOLUTIONS) for m in module.modules()) if module else False
        return [n for n in names if not (is_linear and ("conv" in n.lower() or n == "pad"))]

    @cached_property
    def positions(self) -> list[str]:
        """Names of arguments and in the code that suggest positions."""
        roles = self.callee.roles.items()
        arguments = [name for name, role in roles if role in (*TABLES, "positions")]
        return arguments + self.find_names(POSITIONS)


def relative_difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest magnitude expected; infinite for other shapes and for
    NaN in one of the two.

    >>> relative_difference(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    0.25
    """
    if got.shape != expected.shape:
        return torch.inf
    both_nan = got.isnan() & expected.isnan()
    difference = torch.where(both_nan, 0.0, (got - expected).abs()).nan_to_num(torch.inf)
    finite = expected[expected.isfinite()]
    return difference.max().item() / max(
        finite.abs().max().item() if finite.numel() else 0.0, 1e-30
    )


def find_smallest(
    facts: Facts, difference: Callable[[int, int], float | None], *, min_length: int = 1
) -> str:
    """The smallest inputs `[B, L]` for which `difference(B, L)` isn't None, for a message."""
    callee = facts.callee
    lengths, batches = range(min_length, callee.length + 1), range(1, callee.batch + 1)
    sizes = [(batch, length) for length in lengths for batch in batches]
    for batch, length in sorted(sizes, key=lambda size: size[0] * size[1]):
        try:
            value = difference(batch, length)
        except Exception:
            continue
        if value is not None:
            is_number = value == value and value != torch.inf
            return format_shape(callee, batch, length) + (f", by {value:.2g}" if is_number else "")
    return format_shape(callee, callee.batch, callee.length)


def format_shape(callee: Callee, batch: int, length: int) -> str:
    """The inputs and their shape in the callee's layout, such as "x [1, 2, 24]"."""
    sizes = {
        "B": batch,
        "L": length,
        "D": callee.embed_dim,
        "H": callee.num_heads or 1,
        "E": callee.embed_dim // (callee.num_heads or 1),
    }
    shape = [sizes[letter] for letter in callee.layout.strip("[]").split(", ")]
    return f"{'x' if callee.form in ('self', 'memory') else 'q = k = v'} {shape}"
