"""Break an output down into the weighted values through W_O, the input, the normed input, a bias
and gates, by regression of each feature over the tokens of several inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .factors import FUNCTIONS
from .points import outputs_of_modules
from .readout import Readout, WeightReader

TOLERANCE, READ, BIAS = 1e-6, "the weighted values through W_O", "a bias"


@dataclass(frozen=True)
class Leftover:
    """The parts of an output.

    Attributes:
        words: a description, "the output is ...".
        is_judged: whether all is known: factors are 1 or parameters, gates are what a module
            returns.
    """

    words: str
    is_judged: bool


def explain_output(
    reader: WeightReader, inputs: Sequence[Tensor], readouts: Sequence[Readout]
) -> Leftover | None:
    """The parts of the outputs for `inputs [1, L, D]`; None where they are none of these.

    Without gates `out = a x + b norm(x) + c z W_O + d` is fitted for each feature, then with
    `f(g) z W_O`, `f(g) x` and `f(g)` for each module's output g and the usual functions f.
    """
    module = reader.callee.module
    outs, seen = [], []
    for x in inputs:
        found, handles = ({}, []) if module is None else outputs_of_modules(module)
        try:
            outs.append(reader.callee(x)[0])
        finally:
            for handle in handles:
                handle.remove()
        seen.append(found)
    out, rest = torch.cat(outs), torch.cat([r.rest for r in readouts])
    x = torch.cat([t[0] for t in inputs])
    if x.shape != out.shape:
        return None
    read = out - rest
    parts = {READ: read, "the input": x}
    normed = torch.cat([r.inputs for r in readouts])
    if normed.shape == x.shape and not torch.allclose(normed, x):
        parts["the normed input"] = normed
    if (factors := _fit(parts, out)) is not None:
        return _describe(factors, seen[0])
    assignment = reader.assignment
    o = None if assignment is None else assignment.o
    output, bias = o and o.name, torch.zeros(out.shape[1]).double()
    if o is not None and o.bias is not None:
        bias = o.bias.detach().double()
    for name in seen[0].keys() - {output}:  # a function of the values isn't a gate
        gates = [
            s[name].expand(len(o), -1)
            for s, o in zip(seen, outs, strict=True)
            if name in s and len(s[name]) in (1, len(o))
        ]
        if len(gates) < len(outs) or gates[0].shape[1] not in (1, out.shape[1]):
            continue
        gate = torch.cat(gates)
        if (gate - gate[0]).abs().max() < TOLERANCE:
            continue
        for words, function in FUNCTIONS.items():
            of = f"{words} of {name}" if words else name
            # W_O's bias has the gate too.
            gated = {f"{part} times {of}": function(gate) * parts[part] for part in list(parts)[:2]}
            gated[BIAS] = function(gate).expand_as(out)
            factors = _fit(parts | gated, out)
            # Without a gated part, or with more than W_O's bias, g isn't a gate but a summand.
            if factors is not None and any(part in factors for part in gated if part != BIAS):
                summand = factors.get(BIAS, torch.zeros(out.shape[1]).double())
                is_bias = (summand - bias).abs().max() <= TOLERANCE * out.abs().max()
                if f"{READ} times {of}" in factors and is_bias:
                    return _describe(factors, {})
    return None


def _fit(parts: Mapping[str, Tensor], out: Tensor) -> dict[str, Tensor] | None:
    """The factor of each part, `[D]`, without those that are 0; None where they don't give it."""
    columns = torch.stack([*parts.values(), torch.ones_like(out)], -1).transpose(0, 1)  # [D, N, P]
    if columns.shape[1] < 2 * columns.shape[2]:  # a fit of few tokens proves nothing
        return None
    size = columns.norm(dim=1, keepdim=True).clamp_min(1e-30)
    found = torch.linalg.lstsq(columns / size, out.mT[..., None], driver="gelsd").solution
    error = (columns / size @ found)[..., 0].mT - out
    if not error.abs().max() <= TOLERANCE * out.abs().max():
        return None
    factors = dict(zip(parts, (found / size.mT)[..., 0].unbind(-1), strict=False))
    factors = {name: f for name, f in factors.items() if f.abs().max() > TOLERANCE}
    return factors if any(name.startswith(READ) for name in factors) else None


def _describe(factors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Leftover:
    words, is_judged = [], True
    for part, factor in factors.items():
        if part == BIAS:
            continue
        if (factor - 1).abs().max() <= TOLERANCE:
            words.append(part)
            continue
        if (factor + 1).abs().max() <= TOLERANCE and " times " in part:
            words.append(f"minus {part}")
            continue
        parameter = next(
            (
                name
                for name, p in parameters.items()
                if len(p) == 1
                and p.shape[1] in (1, len(factor))
                and (p[0] - factor).abs().max() <= TOLERANCE * factor.abs().max()
            ),
            None,
        )
        is_judged = is_judged and parameter is not None
        same = (factor - factor.mean()).abs().max() <= TOLERANCE
        size = f"{factor.mean():.4g}" if same else f"{factor.min():.3g} to {factor.max():.3g}"
        of_each = "" if same else " for each feature"
        words.append(f"{part} times {parameter or size}{of_each}")
    return Leftover(f"the output is {' plus '.join(words)}", is_judged)
