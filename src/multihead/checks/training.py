"""Properties of training and evaluation: gradients reach every projection; nothing is dropped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .callee import Callee, CallSpec
from .facts import Facts, find_smallest, format_shape, relative_difference
from .finding import BugName, Finding, NotApplicable
from .projections import projection_of_path

ZERO_GRADIENT = 1e-12  # relative to the largest
# The large step for modules that round to float32 inside, the small one for those with corners.
STEPS = (1e-3, 1e-5)


@dataclass
class _Leaves:
    """Inputs and parameters with their gradients."""

    names: list[str]
    tensors: list[Tensor]
    num_inputs: int  # inputs come first, parameters follow
    grads: Sequence[Tensor | None] = ()

    @property
    def inputs(self) -> list[Tensor]:
        return self.tensors[: self.num_inputs]

    def is_empty(self, grad: Tensor | None) -> bool:
        return grad is None or float(grad.abs().max()) < ZERO_GRADIENT * self.largest

    @property
    def largest(self) -> float:
        return max((float(g.abs().max()) for g in self.grads if g is not None), default=1.0)


def find_wrong_gradients(facts: Facts) -> list[Finding]:
    """Projections without a gradient, gradients that aren't finite, and those that differ from what
    a small step measures.
    """
    if facts.callee.numpy:
        raise NotApplicable("NumPy has no gradients")
    callee, spec = facts.callee.copy(), facts.causal_spec(facts.length)
    finding = Finding(
        BugName.GRADIENTS_CUT,
        "",
        format_shape(callee, callee.batch, callee.length),
        "A .detach(), .data, a torch.no_grad(), a projection that is created and never called,"
        " slices of heads that overlap.",
    )
    leaves, has_frozen = _leaves(callee)
    with torch.enable_grad():
        out = callee(*leaves.inputs, spec=spec)
        if not out.requires_grad and has_frozen:
            raise NotApplicable("all its parameters are frozen, and its inputs get no gradient")
        if not out.requires_grad:
            message = "No gradient reaches anything: the output is cut off."
            look = "A .detach(), .data or torch.no_grad() around the whole."
            return [replace(finding, message=message, look=look)]
        direction = callee.noise(*out.shape, seed=21)
        leaves.grads = torch.autograd.grad(
            (out * direction).sum(), leaves.tensors, allow_unused=True
        )
    pairs = list(zip(leaves.names, leaves.grads))
    bad = [name for name, g in pairs if g is not None and not g.isfinite().all()]
    if bad:
        message = f"The gradient of {', '.join(bad[:3])} is NaN or infinite."
        look = "Queries without a key, 0 * inf inside torch.where, a norm or square root at 0."
        return [replace(finding, bug=BugName.GRADIENTS_NAN, message=message, look=look)]
    is_matrix = [n < leaves.num_inputs or t.ndim >= 2 for n, t in enumerate(leaves.tensors)]
    missing = [name for (name, g), m in zip(pairs, is_matrix) if m and leaves.is_empty(g)]
    if callee.library is None:  # a norm, a sink or slopes that nothing reads
        missing += [name for (name, g), m in zip(pairs, is_matrix) if not m and g is None]
    missing += _rows_without_gradient(callee, leaves, missing)
    if missing:
        message = (
            f"No gradient reaches {', '.join(missing[:4])}: it isn't used, or it is cut off, so"
            " training leaves it unchanged."
        )
        return [replace(finding, message=message)]
    error = _gradient_error(callee, leaves, spec, direction)
    if error is None or error <= 0.02:
        return []
    message = (
        "The gradient isn't that of the output: a small step changes the output by another amount"
        f" (off by {error:.2g}), so a part of the graph is cut off."
    )
    look = "A .detach() or no_grad() on the weights, or a wrong user-defined backward."
    return [replace(finding, message=message, look=look)]


def _leaves(callee: Callee) -> tuple[_Leaves, bool]:
    """Inputs and trainable parameters; and whether there are frozen ones."""
    x = callee.x()
    inputs = {"x": x}
    if callee.form != "self":
        k, v = callee.keys(callee.x(seed=2))
        is_memory = callee.form == "memory"
        inputs = {"x": x, "memory": k} if is_memory else {"query": x, "key": k, "value": v}
    inputs = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    parameters = [] if callee.module is None else list(callee.module.named_parameters())
    floating = [(name, p) for name, p in parameters if p.is_floating_point()]
    trained: dict[str, Tensor] = {name: p for name, p in floating if p.requires_grad}
    has_frozen = len(trained) < len(floating)
    for name, buffer in [] if callee.module is None else callee.module.named_buffers():
        if re.search("slope|alibi", name) and buffer.is_floating_point():
            trained[name] = buffer.requires_grad_()
    names, tensors = [*inputs, *trained], [*inputs.values(), *trained.values()]
    return _Leaves(names, tensors, len(inputs)), has_frozen


def _rows_without_gradient(callee: Callee, leaves: _Leaves, missing: list[str]) -> list[str]:
    """Outputs of projections without a gradient: heads that nothing reads."""
    grads = dict(zip(leaves.names, leaves.grads))
    rows = []
    for path, module in [] if callee.module is None else callee.module.named_modules():
        name = f"{path}.weight".lstrip(".")
        grad = grads.get(name)
        is_input = projection_of_path(path) in ("q", "k", "v", "qkv", "kv")
        if not isinstance(module, nn.Linear) or not is_input or name in missing or grad is None:
            continue
        empty = grad.abs().amax(1) < ZERO_GRADIENT * leaves.largest
        numbers = empty.nonzero().flatten().tolist()
        if len(numbers) > 1:
            rows.append(f"rows {numbers[0]} to {numbers[-1]} of {name}")
    return rows


def _gradient_error(
    callee: Callee, leaves: _Leaves, spec: CallSpec, direction: Tensor
) -> float | None:
    """Relative difference of the gradient from central differences along a random step."""
    if callee.dtype != torch.float64:
        return None
    steps = [callee.noise(*t.shape, seed=50 + n) for n, t in enumerate(leaves.tensors)]
    parts = [(g * step).sum() for g, step in zip(leaves.grads, steps) if g is not None]
    expected, size = float(sum(parts)), float(sum(p * p for p in parts)) ** 0.5

    def value(scale: float) -> float:
        for t, step in zip(leaves.tensors, steps):
            t.data.add_(scale * step)
        with torch.no_grad():
            result = (callee(*leaves.inputs, spec=spec) * direction).sum()
        for t, step in zip(leaves.tensors, steps):
            t.data.sub_(scale * step)
        return float(result)

    slopes = [(value(h) - value(-h)) / (2 * h) for h in STEPS]
    return min(abs(slope - expected) for slope in slopes) / max(size, abs(expected), 1e-30)


def find_active_dropout(facts: Facts) -> list[Finding]:
    """Dropout in evaluation. Rates are set to a half on a copy, so that it shows whatever they
    are.
    """
    callee = facts.callee.copy()
    places = []
    for owner in [] if callee.module is None else callee.module.modules():
        if isinstance(owner, nn.Dropout):
            owner.p = 0.5
            places.append("nn.Dropout")
        for name, value in list(vars(owner).items()):
            if "drop" in name.lower() and isinstance(value, float) and 0 <= value < 1:
                setattr(owner, name, 0.5)
                places.append(name)

    def difference(batch: int, length: int) -> float | None:
        x, spec = callee.x(batch, length), facts.causal_spec(length)
        first, second = (callee(x, spec=replace(spec, seed=seed)) for seed in (1, 2))
        change = relative_difference(first, second)
        return change if change > facts.threshold else None

    if difference(callee.batch, callee.length) is not None:
        where = f" (there is dropout in: {places[0]})" if places else ""
        return [
            Finding(
                BugName.DROPOUT,
                f"In evaluation two runs on one input differ{where}.",
                find_smallest(facts, difference),
                "F.dropout(x, p, training=self.training); dropout_p=self.p if self.training else"
                " 0.0.",
            )
        ]
    if not places:
        flags = [name for name in callee.parameters if "drop" in name.lower()]
        unchanged = f" ({flags[0]} keeps its default)" if flags else ""
        raise NotApplicable(f"it has no dropout{unchanged}; two runs are the same")
    return []
