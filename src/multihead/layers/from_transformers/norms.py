"""Norms of queries and keys, recognised by what they compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..norms import HeadNorm
from .twin import refuse

PAIRS = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("q_ln", "k_ln"),
    ("query_norm", "key_norm"),
    ("norm_q", "norm_k"),
    ("layer_norm_q", "layer_norm_k"),
)


def norms_of(owner: nn.Module) -> tuple[str, str] | None:
    """The names of the norms of queries and keys."""
    for pair in PAIRS:
        if all(isinstance(owner._modules.get(name), nn.Module) for name in pair):
            return pair
    return None


def convert_norm(
    owner: nn.Module, name: str, twin: nn.Module, num_heads: int, head_dim: int
) -> tuple[nn.Module, bool]:
    """The norm at `owner.name` as a module of ours, and whether it is over all heads side by side;
    `twin` is the owner's, which is run.

    Raises:
        MultiheadError: a norm that is none of these.
    """
    source, subject = owner.get_submodule(name), twin.get_submodule(name)
    for form in _forms(subject, num_heads, head_dim):
        if _equal(subject, form, num_heads, head_dim):
            return form(source), form.extent == "all"
    raise refuse(
        owner,
        f"{name} is a {type(source).__name__}, which is neither an RMS norm nor a layer norm over"
        " the width of a head, or over all heads",
    )


class _Form:
    """One way to read a norm."""

    def __init__(self, kind: str, extent: str, offset: float, heads: int, width: int) -> None:
        self.kind, self.extent, self.offset = kind, extent, offset
        self.heads, self.width = heads, width

    def __call__(self, module: nn.Module) -> nn.Module:
        weight, bias, eps = _weights(module)
        width = self.heads * self.width if self.extent == "all" else self.width
        made: nn.Module
        if self.extent == "each":
            with torch.device("meta"):
                made = HeadNorm(self.kind, self.heads, self.width, bias=bias is not None, eps=eps)
        elif self.kind == "rms":
            made = nn.RMSNorm(width, eps, weight is not None, device="meta")
        else:
            made = nn.LayerNorm(width, eps, weight is not None, bias is not None, device="meta")
        for own, given, add in (("weight", weight, self.offset), ("bias", bias, 0.0)):
            if given is not None:
                value = given.detach().clone()
                value = value + add if add else value
                made.register_parameter(own, nn.Parameter(value, _learns(module)))
        return made


def _learns(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _forms(module: nn.Module, num_heads: int, head_dim: int) -> Iterator[_Form]:
    weight, _, _ = _weights(module)
    numel = head_dim if weight is None else weight.numel()
    extents = []
    if numel == head_dim:
        extents.append("head")
    if numel == num_heads * head_dim:
        extents += ["all", "each"] if weight is not None and weight.ndim == 1 else ["each", "all"]
    for extent in extents:
        for kind, offset in (("rms", 0.0), ("rms", 1.0), ("layer", 0.0), ("layer", 1.0)):
            yield _Form(kind, extent, offset, num_heads, head_dim)


def _weights(module: nn.Module) -> tuple[Tensor | None, Tensor | None, float]:
    """Weight, bias and epsilon; those of a list of norms, one a head, stacked."""
    inner = [m for m in module.modules() if m is not module and not isinstance(m, nn.ModuleList)]
    if inner and all(getattr(m, "weight", None) is not None for m in inner):
        parts = [_weights(m) for m in inner]
        weight = torch.stack([w for w, _, _ in parts if w is not None])
        biases = [b for _, b, _ in parts if b is not None]
        return weight, torch.stack(biases) if len(biases) == len(parts) else None, parts[0][2]
    eps = next(
        (
            float(value)
            for name in ("variance_epsilon", "eps", "epsilon", "norm_eps")
            if isinstance(value := getattr(module, name, None), float | int)
        ),
        1e-6,
    )
    found = (getattr(module, "weight", None), getattr(module, "bias", None))
    only, shift = (x if isinstance(x, Tensor) else None for x in found)
    return only, shift, eps


def _equal(theirs: nn.Module, form: _Form, num_heads: int, head_dim: int) -> bool:
    ours = form(theirs)
    generator = torch.Generator().manual_seed(1)
    x = torch.empty(2, 3, num_heads, head_dim).normal_(generator=generator)
    for size in (1.0, 1e-3):  # the smaller one shows epsilon
        y = x * size
        try:
            with torch.no_grad():
                if form.extent == "all":
                    want, got = theirs(y.flatten(2)), ours(y.flatten(2))
                elif form.extent == "each":
                    got = ours(y.transpose(1, 2)).transpose(1, 2)
                    want = theirs(y)
                    if isinstance(getattr(theirs, "norms", None), nn.ModuleList):
                        want = theirs(y.transpose(1, 2)).transpose(1, 2)
                else:
                    want, got = theirs(y), ours(y)
        except (RuntimeError, TypeError, AttributeError):
            return False
        if want.shape != got.shape or not torch.allclose(want, got, atol=1e-4, rtol=1e-4):
            return False
    return True
