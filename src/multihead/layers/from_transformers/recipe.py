"""`Recipe`: how a `MultiHeadAttention` is made of an attention module, or of its twin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .norms import convert_norm
from .projections import Part, place


@dataclass
class Recipe:
    """Paths of parts in the module, sizes, and options of the constructor."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q: Part
    k: Part
    v: Part
    out: Part | None
    inner: str  # path of the module that has the projections, "" for the module itself
    options: dict[str, Any] = field(default_factory=dict)
    norms: tuple[str, str] | None = None
    sinks: str | None = None
    gate: Part | None = None

    def build(self, cls: Any, module: nn.Module, twin: nn.Module) -> Any:
        """The layer with copies of the module's parameters, without positions."""
        q, k, v = (x.of(module) for x in (self.q, self.k, self.v))
        out = None if self.out is None else self.out.of(module)
        width = self.num_heads * self.head_dim
        gate = None if self.gate is None else self.gate.of(module)
        kind = None
        if gate is not None:
            kind = "elementwise" if gate.weight().shape[0] == width else "head"
        with torch.device("meta"):
            layer = cls(
                q.weight().shape[1],
                self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                kdim=k.weight().shape[1],
                vdim=v.weight().shape[1],
                out_dim=None if out is None else out.weight().shape[0],
                sinks=self.sinks is not None,
                gate=kind,
                **self.options,
            )
        for linear, source in ((layer.q_proj, q), (layer.k_proj, k), (layer.v_proj, v)):
            place(linear, source)
        if out is None:
            layer.out_proj = nn.Identity()
        else:
            place(layer.out_proj, out)
        if gate is not None:
            place(layer.gate_proj, gate)
        inner, inner_twin = module.get_submodule(self.inner), twin.get_submodule(self.inner)
        if self.norms is not None:
            sizes = zip(self.norms, (self.num_heads, self.num_kv_heads))
            (layer.q_norm, spans), (layer.k_norm, _) = (
                convert_norm(inner, name, inner_twin, heads, self.head_dim) for name, heads in sizes
            )
            layer.norm_spans_heads = spans
        if self.sinks is not None:
            held: Any = getattr(inner, self.sinks)
            layer.sinks = nn.Parameter(held.detach().flatten().clone(), held.requires_grad)
        return layer.train(module.training)

    def parts(self) -> list[Part]:
        return [x for x in (self.q, self.k, self.v, self.out, self.gate) if x is not None]
