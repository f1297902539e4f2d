"""Weights that are the difference of two softmaxes (Ye et al., 2025): A_h = P_1 - lambda P_2, each
of half of the queries and keys of the head.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from .evidence import Evidence, Judged
from .finding import BugName

FITS = 1e-6
LAMBDAS = r"lambda|lamb(_|$)|(^|_)lam(_|$)"


def judge_difference(judged: Judged, evidence: Evidence, scales: Sequence[float | None]) -> bool:
    """Whether the weights are a difference of two softmaxes, lambda what the code declares; what
    the heads' outputs are multiplied with after their norm is judged with it.
    """
    names = evidence.declared(LAMBDAS)
    if evidence.module is None or not names or evidence.head_dim % 2:
        return False
    found = _fit(evidence, scales)
    if found is None:
        return False
    factor, lambdas = found
    initial = [float(v) for v in _numbers(evidence.module, "init")]
    # With a norm, the paper has the factor 1 - lambda_init after it.
    has_norm = evidence.reader.heads_at is not None
    after = [1 - v for v in initial] if initial and has_norm else [1.0]
    source = next(
        (
            name
            for name, values in _declared(evidence.module, initial)
            if len(values) in (1, len(lambdas))
            and (values - lambdas).abs().max() <= 1e-4 * lambdas.abs().max()
        ),
        None,
    )
    size = factor * _factor_after(evidence)
    if source is None or not any(((size - f).abs() <= 1e-4).all() for f in after):
        return False
    judged.passed.append(
        "the weights are the difference of two softmaxes of q k' times 1 / sqrt(E), the second"
        f" times {lambdas[0]:.4g} ({source}), and the heads' outputs are multiplied by"
        f" {size[0]:.4g}"
    )
    judged.explained |= dict.fromkeys(
        (BugName.NOT_NORMALISED, BugName.NEGATIVE), "a difference of two softmaxes"
    )
    return True


def _fit(evidence: Evidence, scales: Sequence[float | None]) -> tuple[Tensor, Tensor] | None:
    """The factor of the first softmax and lambda of each head, `[H]`."""
    weights, width = evidence.weights, evidence.head_dim // 2
    reads = (weights.abs() > 1e-9).any(0)
    queries, keys = (
        torch.stack([t.unflatten(-1, (-1, width)).transpose(0, 1) for t in tensors])
        for tensors in ([r.queries for r in evidence.readouts], [r.keys for r in evidence.readouts])
    )
    num, heads = queries.shape[1], weights.shape[1]
    if num != 2 * heads or num % keys.shape[1]:
        return None
    keys = keys.repeat_interleave(num // keys.shape[1], 1)
    for scale in scales:
        scores = queries @ keys.mT * (width**-0.5 if scale is None else scale)
        pairs = (slice(0, None, 2), slice(1, None, 2)), (slice(heads), slice(heads, None))
        for first, second in pairs:
            parts = [
                scores[:, some].masked_fill(~reads, -torch.inf).softmax(-1)
                for some in (first, second)
            ]
            design = torch.stack([p.transpose(0, 1).flatten(1) for p in parts], -1)
            target = weights.transpose(0, 1).flatten(1)[..., None]
            solution = torch.linalg.lstsq(design, target).solution
            if (design @ solution - target).abs().max() <= FITS * target.abs().max():
                return solution[:, 0, 0], -solution[:, 1, 0] / solution[:, 0, 0]
    return None


def _numbers(module: nn.Module, part: str) -> Iterator[float]:
    for each in module.modules():
        for name, value in vars(each).items():
            is_named = re.search(LAMBDAS, name, re.IGNORECASE) and part in name
            if is_named and isinstance(value, float):
                yield value


def _declared(module: nn.Module, initial: Sequence[float]) -> Iterator[tuple[str, Tensor]]:
    """Values of lambda, one or `[H]`, that parameters or attributes give."""
    parameters = {n: p.detach().double() for n, p in module.named_parameters()}
    learned = {n: p for n, p in parameters.items() if re.search(LAMBDAS, n, re.IGNORECASE)}
    for name, p in learned.items():
        others = [re.sub("q1$", end, name) for end in ("k1", "q2", "k2")]
        if name.endswith("q1") and all(n in learned for n in others):
            k1, q2, k2 = (learned[n] for n in others)
            difference = (p * k1).sum(-1).exp() - (q2 * k2).sum(-1).exp()
            for start in initial or (0.0,):
                yield (
                    f"exp({name} {others[0]}) - exp({others[1]} {others[2]}) + {start:.4g}",
                    (difference + start).flatten(),
                )
        for words, function in (("", lambda t: t), ("sigmoid of ", torch.sigmoid)):
            for start in initial or (0.0,):
                plus = f" + {start:.4g}" if start else ""
                yield f"{words}{name}{plus}", function(p).flatten() + start
    for value in () if learned else _numbers(module, ""):
        yield "an attribute", torch.tensor([value], dtype=torch.float64)


def _factor_after(evidence: Evidence) -> float:
    """By what the heads' outputs are multiplied between the module that they pass and W_O; NaN if
    that isn't one number.
    """
    path, module = evidence.reader.heads_at, evidence.module
    if path is None or module is None:
        return 1.0
    norm, ratios = copy.deepcopy(module.get_submodule(path)).double(), []
    for x, r in zip(evidence.inputs, evidence.readouts, strict=True):
        if r.output is None:
            return torch.nan
        z = norm(r.heads.unflatten(-1, (len(r.weights), -1))).flatten(1) @ r.output
        got = evidence.facts.callee(x)[0] - r.rest
        ratio = float((got * z).sum() / z.square().sum())
        if not (got - ratio * z).abs().max() <= FITS * got.abs().max():
            return torch.nan
        ratios.append(ratio)
    return ratios[0] if max(ratios) - min(ratios) <= 1e-4 else torch.nan
