"""What must hold of any attention when it's trained, or run in other numbers than float64:
gradients, dropout, overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .calling import Subject
from .facts import Facts, Finding, NotApplicable, gap, shape_words, smallest
from .projections import role_of_path


def gradients(facts: Facts) -> list[Finding]:
    """Every projection gets a gradient, finite, and the one that a small step measures."""
    subject = facts.subject
    if subject.numpy:
        raise NotApplicable("NumPy has no gradients")
    options, shown, found = (
        facts.options(subject.length),
        shape_words(subject, subject.batch, subject.length),
        [],
    )
    trial = subject.copy()
    weights = (
        []
        if trial.module is None
        else [(n, p) for n, p in trial.module.named_parameters() if p.is_floating_point()]
    )
    frozen = [n for n, p in weights if not p.requires_grad]
    weights = [(n, p) for n, p in weights if p.requires_grad]
    inputs = {name: t.requires_grad_() for name, t in _inputs(trial).items()}
    with torch.enable_grad():
        out = trial(*inputs.values(), **options)
        if not out.requires_grad:
            if frozen:
                raise NotApplicable(
                    "all its parameters are frozen, and no gradient reaches its inputs"
                )
            return [
                Finding(
                    "gradients don't reach a projection",
                    "No gradient reaches anything: the output is cut off.",
                    shown,
                    "A .detach(), .data or torch.no_grad() around the whole.",
                )
            ]
        toward = subject.noise(*out.shape, seed=21)
        ends = [*inputs.values(), *(p for _, p in weights)]
        grads = torch.autograd.grad((out * toward).sum(), ends, allow_unused=True)
    names = [*inputs, *(n for n, _ in weights)]
    bad = [n for n, g in zip(names, grads) if g is not None and not g.isfinite().all()]
    if bad:
        found.append(
            Finding(
                "gradients become NaN",
                f"The gradient of {', '.join(bad[:3])} is NaN or infinite.",
                shown,
                "Rows without a key, 0 * inf behind a where, a norm or square root at 0.",
            )
        )
        return found
    matrices = {n for n, p in zip(names, ends) if n in inputs or p.ndim >= 2}
    largest = max((float(g.abs().max()) for g in grads if g is not None), default=1.0)
    none = [
        n
        for n, g in zip(names, grads)
        if n in matrices and (g is None or float(g.abs().max()) < 1e-12 * largest)
    ]
    rows = _empty_rows(trial, dict(zip(names, grads)), none, largest)
    if none or rows:
        what = [*none, *rows]
        found.append(
            Finding(
                "gradients don't reach a projection",
                f"No gradient reaches {', '.join(what[:4])}: it isn't used, "
                "or it "
                "is cut off, and training leaves it as it is.",
                shown,
                "A .detach(), .data, a torch.no_grad(), a projection that is made and never called,"
                " slices of heads that overlap.",
            )
        )
    else:
        change = _directional(trial, facts, inputs, weights, grads, options, toward)
        if change is not None and change > 0.02:
            found.append(
                Finding(
                    "gradients don't reach a projection",
                    "The gradient isn't that of the output: a small step "
                    "changes "
                    f"it by another amount (off by {change:.2g}), so a part of the way is cut off.",
                    shown,
                    "A .detach() or a no_grad() on the weights, or a backward of its own that is"
                    " wrong.",
                )
            )
    return found


def _inputs(subject: Subject) -> dict[str, Tensor]:
    x = subject.x()
    if subject.form == "self":
        return {"x": x}
    k, v = subject.keys(subject.x(seed=2))
    if subject.form == "memory":
        return {"x": x, "what it reads": k.clone()}
    return {"query": x, "key": k.clone(), "value": v.clone()}


def _empty_rows(
    subject: Subject, grads: dict[str, Tensor | None], none: list[str], largest: float
) -> list[str]:
    """Runs of outputs of a projection that get no gradient: heads that nobody reads."""
    found = []
    for name, module in subject.module.named_modules() if subject.module is not None else ():
        grad = (
            grads.get(f"{name}.weight".lstrip("."))
            if role_of_path(name) in ("q", "k", "v", "qkv", "kv")
            else None
        )
        if (
            isinstance(module, nn.Linear)
            and grad is not None
            and f"{name}.weight" not in none
            and grad.ndim == 2
        ):
            empty = (grad.abs().amax(1) < 1e-12 * largest).nonzero().flatten().tolist()
            if len(empty) > 1:
                found.append(f"rows {empty[0]} to {empty[-1]} of {name}.weight")
    return found


def _directional(
    subject: Subject,
    facts: Facts,
    inputs: dict[str, Tensor],
    weights: Sequence[tuple[str, Tensor]],
    grads: tuple[Tensor | None, ...],
    options: dict[str, Any],
    toward: Tensor,
) -> float | None:
    """How far the gradient is from what a small step of everything measures."""
    if subject.dtype != torch.float64:
        return None
    ends = [*inputs.values(), *(p for _, p in weights)]
    ways = [subject.noise(*e.shape, seed=50 + n) for n, e in enumerate(ends)]
    parts = [(g * way).sum() for g, way in zip(grads, ways) if g is not None]
    said, size = float(sum(parts)), float(sum(p * p for p in parts)) ** 0.5
    off = []
    for step in (
        1e-3,
        1e-5,
    ):  # the large one for what rounds to float32 inside, the small one for what has corners
        values = []
        for sign in (1, -1):
            for e, way in zip(ends, ways):
                e.data.add_(sign * step * way)
            with torch.no_grad():
                values.append((subject(*inputs.values(), **options) * toward).sum())
            for e, way in zip(ends, ways):
                e.data.sub_(sign * step * way)
        off.append(
            abs(float(values[0] - values[1]) / (2 * step) - said) / max(size, abs(said), 1e-30)
        )
    return min(off)


def dropout(facts: Facts) -> list[Finding]:
    """In evaluation nothing is dropped. Rates are set to a half on a copy, so that it shows
    whatever they are.
    """
    subject = facts.subject.copy()
    places = []
    for owner in [] if subject.module is None else subject.module.modules():
        if isinstance(owner, nn.Dropout):
            owner.p = 0.5
            places.append("nn.Dropout")
        for name, value in list(vars(owner).items()):
            if "drop" in name.lower() and isinstance(value, float) and 0 <= value < 1:
                setattr(owner, name, 0.5)
                places.append(name)
    flags = [n for n, p in subject.parameters.items() if "drop" in n.lower()]

    def wrong(batch: int, length: int) -> float | None:
        x, options = subject.x(batch, length), facts.options(length)
        change = gap(subject(x, **options, seed=1), subject(x, **options, seed=2))
        return change if change > facts.zero else None

    if wrong(subject.batch, subject.length) is not None:
        return [
            Finding(
                "dropout active in evaluation",
                "In evaluation two runs on one input differ"
                f"{f' (where dropout is: {places[0]})' if places else ''}.",
                smallest(facts, wrong),
                "F.dropout(x, p, training=self.training); dropout_p=self.p if self.training else"
                " 0.0.",
            )
        ]
    if not places:
        raise NotApplicable(
            "it has no dropout of its own"
            + (f" ({flags[0]} is left as it is)" if flags else "")
            + "; two runs are the same"
        )
    return []


def strides(facts: Facts) -> list[Finding]:
    """Where its inputs lie in memory makes no difference."""
    subject, options = facts.subject, facts.options(facts.subject.length)
    x = subject.x()
    want, loose = subject(x, **options), replace(subject, contiguous=False)
    layouts = {
        "a transposed view": x.transpose(0, 1).contiguous().transpose(0, 1),
        "a part of a wider tensor": torch.cat([x, x + 1], -1)[..., : subject.width],
        "a transposed view of features": x.transpose(1, 2).contiguous().transpose(1, 2),
        "every other row of a longer one": torch.stack([x, x + 1], 2).flatten(1, 2)[:, ::2],
    }
    for what, given in layouts.items():
        try:
            change = gap(loose(given, **options), want)
        except Exception as error:
            return [
                Finding(
                    "not contiguous inputs",
                    f"It fails on inputs that aren't contiguous ({what}): {error}",
                    shape_words(subject, 1, 2) + f", {what}",
                    ".reshape() in place of .view(), or .contiguous() before it.",
                )
            ]
        if change > subject.tolerance():
            return [
                Finding(
                    "not contiguous inputs",
                    f"On inputs that aren't contiguous ({what}) the output is another.",
                    shape_words(subject, 1, 2) + f", {what}",
                    "as_strided, .data_ptr(), a view by hand of the storage.",
                )
            ]
    return []


def asked_weights(facts: Facts) -> list[Finding]:
    """Asking for the weights changes no output, and they are weights."""
    subject, n = facts.subject, facts.subject.length
    options = facts.options(n)
    x, found = subject.x(), []
    out, rest = subject.everything(x, **options)
    if subject.weights_flag is not None:
        for value in (True, False):
            more = {**options.get("more", {}), subject.weights_flag: value}
            try:
                other, more_rest = subject.everything(x, **options | {"more": more})
            except Exception as error:
                raise NotApplicable(
                    f"{subject.weights_flag}={value} can't be tried ({type(error).__name__})"
                ) from None
            rest = more_rest if value else rest
            if not gap(other, out) <= subject.tolerance():
                found.append(
                    Finding(
                        "results depend on whether weights are asked for",
                        f"{subject.weights_flag}={value} "
                        "changes the "
                        f"output by {gap(other, out):.2g} of its size.",
                        shape_words(subject, 1, 2),
                        "The branch that returns weights: it needs the same mask, scale and"
                        " positions.",
                    )
                )
                return found
    elif not any(_weights(t, n) is not None for t in rest):
        raise NotApplicable("it gives no weights and has no argument that asks for them")
    if facts.mentions(r"sink|s_aux|add_zero|bias_k$"):
        return found
    seen = next((w for t in rest if (w := _weights(t, n)) is not None), None)
    if seen is not None and seen.isfinite().all():
        off = (seen.sum(-1) - 1).abs().max().item()
        if off > 1e-3 or seen.min() < -1e-6:
            axis = next(
                (a for a in range(seen.ndim - 1) if (seen.sum(a) - 1).abs().max() < 1e-3), None
            )
            where = "" if axis is None else f" They do over axis {axis} of {list(seen.shape)}."
            found.append(
                Finding(
                    "softmax over the wrong axis" if where else "weights don't sum to one",
                    "The weights that it returns don't sum to one over the keys (off by"
                    f" {off:.2g}).{where}",
                    shape_words(subject, subject.batch, n),
                    "softmax(dim=-1) of scores [B, H, L, S].",
                )
            )
    return found


def _weights(t: Any, length: int) -> Tensor | None:
    """What was returned beside the output, where its shape is that of weights."""
    try:
        t = torch.as_tensor(t)
    except Exception:
        return None
    if t.ndim < 2 or t.shape[-2:] != (length, length) or not t.is_floating_point():
        return None
    return t.double() if -1e-6 <= t.min() < t.max() <= 1 + 1e-6 else None  # else a bias, or scores


def large_scores(facts: Facts) -> list[Finding]:
    """Scores of any size have a softmax: the largest is taken off before exp."""
    subject, options = facts.subject, facts.options(facts.subject.length)

    def wrong(batch: int, length: int, size: float = 60.0) -> float | None:
        out = subject(subject.x(batch, length, size=size), **facts.options(length))
        return None if out.isfinite().all() else torch.nan

    if not subject(subject.x(), **options).isfinite().all():
        raise NotApplicable("its output isn't finite to begin with")
    if wrong(subject.batch, subject.length) is not None:
        return [
            Finding(
                "softmax overflows",
                "Large scores give NaN or infinity: exp() of them overflows.",
                smallest(facts, wrong) + ", drawn 60 times as large",
                "Take the row's maximum off before exp: exp(s - s.max(-1, keepdims=True)).",
            )
        ]
    return []


def half(facts: Facts) -> list[Finding]:
    """In float16 the output is that of float64, to the precision of float16."""
    subject = facts.subject
    if subject.numpy:
        raise NotApplicable("NumPy functions are judged in float64")
    options = facts.options(subject.length)
    x = (
        subject.x(size=2.5).half().double()
    )  # scores to 50 or so: exp of them is beyond float16, they are not
    try:
        low = subject.copy(torch.float16)
        out = low(x, **options)
        exact = low.copy(torch.float64)
        want = exact(x, **options)
    except Exception as error:
        raise NotApplicable(
            f"it doesn't run in float16 ({type(error).__name__}:"
            f" {' '.join(str(error).split())[:90]})"
        ) from None
    if not want.isfinite().all():
        raise NotApplicable("its output isn't finite in float64 either")
    if not out.isfinite().all() or gap(out, want) > 0.2:
        what = (
            "is NaN or infinite"
            if not out.isfinite().all()
            else f"is off by {gap(out, want):.2g} of its size"
        )

        def wrong(batch: int, length: int) -> float | None:
            y = subject.x(batch, length, size=2.5).half().double()
            change = gap(low(y, **facts.options(length)), exact(y, **facts.options(length)))
            return change if not change < 0.2 else None

        return [
            Finding(
                "half-precision softmax overflow",
                f"In float16 the output {what}, where scores of 50 or so must still work.",
                smallest(facts, wrong) + ", float16",
                "A softmax by hand without the maximum taken off, sums of exponentials in float16:"
                " compute the softmax in float32, softmax(dtype=torch.float32), and turn back.",
            )
        ]
    return []
