"""Judge what an output has besides the weighted values: nothing, a bias, a residual, a norm."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import types
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .evidence import TOLERANCE, Evidence, Judged
from .finding import BugName
from .leftover import explain_output
from .value_terms import explain_heads

SINKS = (
    r"(^|_)sinks?(_|$)|bias_k|add_zero_attn|null_(k|kv|key)|add_one|off_?by_?one|"
    r"softmax_?(1|one)"
)
READS = "the output is the weighted values through W_O"


def judge_rest(judged: Judged, evidence: Evidence) -> None:
    """The part of the output besides the weighted values, `[N, L, D]`."""
    rest = torch.stack([r.rest for r in evidence.readouts])
    x = torch.cat(list(evidence.inputs))
    size = rest.abs().max().clamp_min(1.0)

    def is_constant(t: Tensor) -> bool:
        return bool((t - t[0, 0]).abs().max() <= TOLERANCE * size)

    if is_constant(rest):
        judged.passed.append(READS)
    elif rest.shape == x.shape and is_constant(rest - x):
        judged.passed.append(f"{READS}, added to the input")
    elif (words := _find_norm(evidence, rest, x)) is not None:
        judged.passed.append(f"{READS}, {words}")
    elif (found := explain_heads(evidence.module, evidence.inputs, evidence.readouts)) is not None:
        judged.passed.append(found[0])
        judged.unjudged += [odd for odd in found[1:] if odd]
    elif (parts := explain_output(evidence.reader, evidence.inputs, evidence.readouts)) is not None:
        (judged.passed if parts.is_judged else judged.unjudged).append(parts.words)
    else:
        names = evidence.declared(SINKS)
        beside = f" (next to a sink, {names[0]})" if names else ""
        judged.unjudged.append(
            f"a part of the output that doesn't depend on the values{beside}, up to"
            f" {float(rest.abs().max()):.3g}"
        )
    has_input = any("input" in line for line in judged.passed if line.startswith(READS))
    if not has_input and evidence.facts.callee.library is None:
        names = evidence.facts.find_names("^residual$|^shortcut$|^identity$")
        is_known = any(line.startswith(READS) for line in judged.passed)
        if names and is_known and _is_missing(evidence, names[0]):
            judged.find(
                BugName.DIFFERS,
                f"The code names a residual ({names[0]}), and the output has none: without it,"
                " it is the weighted values through W_O.",
                evidence.example,
                f"Where {names[0]} is added to the output.",
            )
        else:
            judged.unjudged += [
                f"why the output has no residual, which {n} names" for n in names[:1]
            ]


def _is_missing(evidence: Evidence, name: str) -> bool:
    """Whether a residual is a variable of `forward` that isn't returned by itself, and no
    attribute turns it off.
    """
    module = evidence.module
    forward = getattr(type(module), "forward", None)
    if module is None or not isinstance(forward, types.FunctionType):
        return False
    switches = [
        value
        for owner in module.modules()
        for attribute, value in vars(owner).items()
        if re.search("resid|skip|shortcut|identity", attribute, re.IGNORECASE)
    ]
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    is_returned = re.search(rf"return\b.*,.*\b{name}\b|return\b.*\b{name}\b\s*,", source)
    return name in forward.__code__.co_varnames and not switches and is_returned is None


def _find_norm(evidence: Evidence, rest: Tensor, x: Tensor) -> str | None:
    """A norm after the output projection, with or without the residual."""
    if evidence.module is None or rest.shape != x.shape:
        return None
    out = torch.cat([evidence.facts.callee(t) for t in evidence.inputs])
    assignment = evidence.reader.assignment
    o = None if assignment is None else assignment.o
    y = out - rest + (o.bias.detach() if o is not None and o.bias is not None else 0.0)
    for name, norm in _norms(evidence.module, x.shape[-1]):
        before = {"": y, " of its sum with the input": y + x}
        for (words, t), after in itertools.product(before.items(), (False, True)):
            expected = norm(t) + (x if after else 0.0)
            if (expected - out).abs().max() <= TOLERANCE * out.abs().max():
                return f"then the norm {name}{words}" + (", added to the input" if after else "")
    return None


def _norms(module: nn.Module, width: int) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are norms of vectors of this width."""
    for name, child in module.named_modules():
        shapes = {tuple(p.shape) for p in child.parameters(recurse=False)}
        if "norm" in type(child).__name__.lower() and shapes <= {(width,)} and name:
            yield name, copy.deepcopy(child).double()
