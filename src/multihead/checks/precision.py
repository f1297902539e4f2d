"""Properties of numbers and memory: large scores, float16, strides, and requested weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .arguments import QUERY_KEY_SHAPES
from .callee import CallSpec
from .facts import Facts, find_smallest, format_shape, relative_difference
from .finding import BugName, Finding, NotApplicable
from .trial_calls import masked_calls

SINK_NAMES = r"sink|s_aux|add_zero|bias_k$"
# Inputs for scores of about 50, whose exp is beyond float16, and for much larger scores.
HALF_SIZE, LARGE_SIZE = 2.5, 60.0
LIMIT = 0.2  # relative difference of an output in half precision
LOOK_SOFTMAX = (
    "A user-defined softmax that doesn't subtract the maximum, sums of exponentials in float16:"
    " compute the softmax in float32, softmax(dtype=torch.float32), and convert back."
)
LOOK_MASKED = (
    "Numbers that hide scores, and sums of them: two of torch.finfo(dtype).min are -inf, 0 times"
    " -inf is NaN. masked_fill(~mask, -inf) once, and the softmax in float32."
)


def find_overflow(facts: Facts) -> list[Finding]:
    """Large scores that give NaN or infinity."""
    callee = facts.callee

    def overflows(batch: int, length: int, size: float = LARGE_SIZE) -> float | None:
        out = callee(callee.x(batch, length, size=size), spec=facts.causal_spec(length))
        return None if out.isfinite().all() else torch.nan

    if overflows(callee.batch, facts.length, 1.0) is not None:
        raise NotApplicable("its output isn't finite to begin with")
    if overflows(callee.batch, facts.length) is None:
        return []
    return [
        Finding(
            BugName.OVERFLOW,
            "Large scores give NaN or infinity: their exp() overflows.",
            f"{find_smallest(facts, overflows)}, drawn {LARGE_SIZE:.0f} times as large",
            "Subtract the maximum over the keys before exp: exp(s - s.max(-1, keepdims=True)).",
        )
    ]


def find_half_overflow(facts: Facts) -> list[Finding]:
    """Outputs in float16 or bfloat16 that aren't those of float64, of the plain call and of those
    with masks and padding.
    """
    callee = facts.callee
    if callee.numpy:
        raise NotApplicable("NumPy functions are checked in float64")
    if findings := _find_difference(facts, torch.float16, HALF_SIZE):
        return findings
    with suppress(NotApplicable):
        return _find_difference(facts, torch.bfloat16, 1.0 / 2)
    return []


def _find_difference(facts: Facts, dtype: torch.dtype, size: float) -> list[Finding]:
    """The first call whose output isn't that of float64, with inputs of this size.

    Raises:
        NotApplicable: the plain call fails in this type.
    """
    callee, name = facts.callee, str(dtype).removeprefix("torch.")

    def run(batch: int, length: int, spec: CallSpec | None = None) -> tuple[Tensor, Tensor]:
        x = callee.x(batch, length, size=size).to(dtype).double()
        spec = facts.causal_spec(length) if spec is None else spec
        return low(x, spec=spec), exact(x, spec=spec)

    def difference(batch: int, length: int) -> float | None:
        change = relative_difference(*run(batch, length))
        return change if not change < LIMIT else None

    triangle = torch.ones(facts.length, facts.length).tril().bool()
    default = triangle if facts.is_causal else torch.ones_like(triangle)
    calls: list[tuple[str, CallSpec | None]] = [("", None)]
    calls += [(f", called {words},", spec) for words, _, spec in masked_calls(facts, default)]
    for words, spec in calls:
        try:
            low = callee.copy(dtype)
            exact = low.copy(torch.float64)
            out, expected = run(callee.batch, callee.length, spec)
        except Exception as error:
            text = " ".join(str(error).split())[:90]
            if "without overflow" in text:
                return [
                    Finding(
                        BugName.HALF_FILL,
                        f"Called in {name} it raises an error: the number that hides scores, such"
                        f" as -1e9, is beyond float16, which ends at -65504 ({text}).",
                        f"{format_shape(callee, 1, 2)}, {name}",
                        "masked_fill(..., -inf) or torch.finfo(scores.dtype).min.",
                        is_policy=True,
                    )
                ]
            if words:
                continue
            raise NotApplicable(
                f"it doesn't run in {name} ({type(error).__name__}: {text})"
            ) from None
        if not expected.isfinite().all():
            if words:
                continue
            raise NotApplicable("its output isn't finite in float64 either")
        change = relative_difference(out, expected)
        is_finite = bool(out.isfinite().all())
        if is_finite and change <= LIMIT:
            continue
        off = (out - expected).abs().nan_to_num(torch.inf, torch.inf).flatten()
        b, i, f = (int(n) for n in torch.unravel_index(off.argmax(), out.shape))
        what = f"is off by {change:.2g} of its size" if is_finite else "is NaN or infinite"
        scores = ", where scores of about 50 must still work" if size == HALF_SIZE else ""
        example = find_smallest(facts, difference) if spec is None else ""
        example = example or format_shape(callee, callee.batch, callee.length)
        return [
            Finding(
                BugName.HALF,
                f"In {name}{words} the output {what}{scores}: feature {f} of query {i} in batch"
                f" element {b} is {out[b, i, f]:.4g}, and {expected[b, i, f]:.4g} in float64.",
                f"{example}, {name}",
                LOOK_MASKED if words else LOOK_SOFTMAX,
            )
        ]
    return []


def find_changed_inputs(facts: Facts) -> list[Finding]:
    """Inputs and masks that a call changes in place."""
    callee = replace(facts.callee, changed=set())
    specs = [CallSpec(), facts.causal_spec(facts.length)]
    if callee.padding is not None and callee.padding.shape not in QUERY_KEY_SHAPES:
        valid = torch.arange(facts.length) < facts.length - 1
        specs.append(CallSpec(valid=valid.expand(callee.batch, -1)))
    for spec in specs:
        callee(callee.x(), spec=spec)
    if not callee.changed:
        return []
    names = " and ".join(sorted(callee.changed))
    return [
        Finding(
            BugName.CHANGED,
            f"A call changes {names} in place, so whatever uses {names} afterwards (a residual, the"
            " next layer, a second call) gets other values.",
            format_shape(callee, 1, 1),
            "Operations that end in _ (mul_, add_, masked_fill_, copy_), +=, and assignments to"
            " slices, of an argument or a view of it: use those that return a new tensor.",
        )
    ]


def find_stride_dependence(facts: Facts) -> list[Finding]:
    """Inputs that aren't contiguous and give an error or another output."""
    callee, spec = facts.callee, facts.causal_spec(facts.length)
    x = callee.x()
    expected, strided = callee(x, spec=spec), replace(callee, contiguous=False)
    layouts = {
        "a transposed view": x.transpose(0, 1).contiguous().transpose(0, 1),
        "a part of a wider tensor": torch.cat([x, x + 1], -1)[..., : callee.embed_dim],
        "a transposed view of features": x.transpose(1, 2).contiguous().transpose(1, 2),
        "every second vector of a longer one": torch.stack([x, x + 1], 2).flatten(1, 2)[:, ::2],
    }
    for layout, strided_x in layouts.items():
        try:
            change = relative_difference(strided(strided_x, spec=spec), expected)
        except Exception as error:
            message = f"It fails on inputs that aren't contiguous ({layout}): {error}"
            look = ".reshape() instead of .view(), or .contiguous() before it."
        else:
            if change <= callee.tolerance():
                continue
            message = f"On inputs that aren't contiguous ({layout}) the output differs."
            look = "as_strided, .data_ptr(), a manual view of the storage."
        return [Finding(BugName.STRIDES, message, f"{format_shape(callee, 1, 2)}, {layout}", look)]
    return []


def find_weights_problems(facts: Facts) -> list[Finding]:
    """Outputs that change when the weights are requested, and weights that don't sum to one."""
    callee, spec, x = facts.callee, facts.causal_spec(facts.length), facts.callee.x()
    flag = callee.weights_flag
    out, rest = callee.call_full(x, spec=spec)
    if flag is None and not any(_to_weights(t, facts.length) is not None for t in rest):
        raise NotApplicable("it returns no weights and has no argument that requests them")
    for value in (True, False) if flag is not None else ():
        try:
            other, other_rest = callee.call_full(x, spec=spec.with_arguments(**{str(flag): value}))
        except Exception as error:
            raise NotApplicable(f"{flag}={value} can't be tried ({type(error).__name__})") from None
        rest = other_rest if value else rest
        change = relative_difference(other, out)
        if not change <= callee.tolerance():
            return [
                Finding(
                    BugName.WEIGHTS_FLAG,
                    f"{flag}={value} changes the output by {change:.2g} of its size.",
                    format_shape(callee, 1, 2),
                    "The branch that returns weights: it needs the same mask, scale and positions.",
                )
            ]
    return [] if facts.find_names(SINK_NAMES) else _find_wrong_sums(facts, rest)


def _find_wrong_sums(facts: Facts, rest: list[Any]) -> list[Finding]:
    """Returned weights that don't sum to one over the keys."""
    candidates = (_to_weights(t, facts.length) for t in rest)
    weights = next((w for w in candidates if w is not None), None)
    if weights is None or not weights.isfinite().all():
        return []
    error = (weights.sum(-1) - 1).abs().max().item()
    if error <= 1e-3 and weights.min() >= -1e-6:
        return []
    axes = (a for a in range(weights.ndim - 1) if (weights.sum(a) - 1).abs().max() < 1e-3)
    axis = next(axes, None)
    hint = "" if axis is None else f" They do over axis {axis} of {list(weights.shape)}."
    return [
        Finding(
            BugName.NOT_NORMALISED if axis is None else BugName.AXIS,
            f"The returned weights don't sum to one over the keys (off by {error:.2g}).{hint}",
            format_shape(facts.callee, facts.callee.batch, facts.length),
            "softmax(dim=-1) of scores [B, H, L, S].",
        )
    ]


def _to_weights(t: Any, length: int) -> Tensor | None:
    """A part of the result as weights `[.., L, L]`, if its shape and range are those of weights."""
    try:
        t = torch.as_tensor(t)
    except Exception:
        return None
    if t.ndim < 2 or t.shape[-2:] != (length, length) or not t.is_floating_point():
        return None
    # Otherwise it is a bias, or scores.
    return t.double() if -1e-6 <= t.min() < t.max() <= 1 + 1e-6 else None
